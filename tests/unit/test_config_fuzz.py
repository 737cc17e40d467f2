"""2,000 wrong configurations: each composes, or is rejected with one line per problem.

The examples are the same in every run (`derandomize`, and `_same_examples` of conftest.py). What
they have found is in `test_config_bounds.py` and `test_yaml_files.py`.
"""

import math
import re
from copy import deepcopy
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openenv_pipe.config.compose import assign, compose, readable_errors
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.schema_keys import known_keys
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.resources import shipped_dir

NUM_VALIDATED = 1900
NUM_COMPOSED = 50  # with overrides, and as many with files
LIMIT_S = 900  # of one test, so that a hang is a failure

pytestmark = [pytest.mark.usefixtures("no_hang"), pytest.mark.slow]
MAX_LINES = 30
MAX_MESSAGE = 12_000
CHARACTERS = st.characters(codec=None)  # half surrogate pairs and control characters too
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, -(10**30)]),
    st.sampled_from([0.0, -0.0, 1e-300, 5e-324, 1e308, math.nan, math.inf, -math.inf, 0.5]),
    st.integers(),
    st.floats(),
)
SYNTAX = ("${seed}", "${", "${oc.env:HOME}", "???", "null", "{{ 1 / 0 }}", "{% if %}", "(", "../..")
ODD_TEXTS = ("\0", "\x1b[31m", "\u202e", "\ud800", "http://x", "a:b", "7", "x" * 3000, "", "all")
TEXTS = st.one_of(st.text(CHARACTERS, max_size=20), st.sampled_from([*SYNTAX, *ODD_TEXTS]))
GROUPS = st.sampled_from(["conf", "env", "model", "engine", "reward", "trainer/loss", "x"])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.just(b"bytes"))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(TEXTS, st.integers(0, 9), st.just("type")), inner, max_size=3),
    ),
    max_leaves=8,
)
KNOWN = known_keys()
KEYS = st.one_of(
    st.sampled_from(KNOWN),
    st.sampled_from(KNOWN).map(lambda key: f"{key}x"),
    st.sampled_from(KNOWN).flatmap(lambda key: st.text("abé_1", min_size=1).map(f"{key}.".__add__)),
    st.text("abc._é", min_size=1, max_size=12),
)
CHANGES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=3)
RAW = st.one_of(
    st.text(CHARACTERS, max_size=12),
    st.text("[]{}(),:'\"\\$ ax1.=~+@/-", max_size=16),
    NUMBERS.filter(lambda number: abs(number) < 10**40).map(str),
    TEXTS,
    st.integers(1, 3000).map(lambda depth: "[" * depth + "]" * depth),
)
OVERRIDES = st.one_of(
    st.tuples(st.sampled_from(["", "+", "++", "~"]), KEYS, RAW).map(
        lambda parts: f"{parts[0]}{parts[1]}={parts[2]}"
    ),
    st.tuples(st.sampled_from(["conf", "env", "model", "engine", "reward", "x"]), RAW).map(
        "=".join
    ),
    RAW,
)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def bounded(num_examples: int):
    return settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@cache
def saved() -> dict:
    return compose(["conf=smoke"]).config.model_dump()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Be in a folder with `conf/`, away from the checkout."""
    path = tmp_path_factory.mktemp("fuzz")
    for group in ("conf", "env"):
        (path / "conf" / group).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


def check_message(error: ConfigError) -> str:
    message = str(error)
    assert message
    assert not CONTROL.search(message), repr(message)
    assert len(message.splitlines()) <= MAX_LINES, message
    assert len(message) <= MAX_MESSAGE, message
    assert "Traceback" not in message
    return message


@bounded(NUM_VALIDATED)
@given(changes=CHANGES)
def test_wrong_values_are_rejected_by_name(changes):
    values = deepcopy(saved())
    try:
        with readable_errors():
            for key, value in changes.items():
                assign(values, key, value)
            config = RunConfig.model_validate(values)
    except ConfigError as error:
        message = check_message(error)
        assert any(part in message for key in changes for part in key.split(".")), message
    else:
        assert RunConfig.model_validate_json(config.model_dump_json()) == config


@bounded(NUM_COMPOSED)
@given(overrides=st.lists(OVERRIDES, min_size=1, max_size=2))
def test_wrong_overrides_are_rejected(folder, overrides):
    try:
        compose(["conf=smoke", *overrides])
    except ConfigError as error:
        check_message(error)


@bounded(NUM_COMPOSED)
@given(
    name=st.sampled_from(["conf/wordle", "env/wordle"]),
    place=st.integers(0, 1500),
    removed=st.integers(0, 40),
    added=st.one_of(RAW, st.sampled_from(["&a [*a]", "*a", "<<: *a", "\n---\n", "\t", "\n- x\n"])),
)
def test_damaged_files_are_rejected(folder, name, place, removed, added):
    text = (shipped_dir("conf") / f"{name}.yaml").read_text()
    place = place % len(text)
    damaged = text[:place] + added + text[place + removed :]
    (folder / "conf" / f"{name}.yaml").write_text(damaged, errors="surrogatepass")
    try:
        compose(["conf=wordle"])
    except ConfigError as error:
        check_message(error)
    finally:
        (folder / "conf" / f"{name}.yaml").unlink()
