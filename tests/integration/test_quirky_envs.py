"""`env inspect` and `env check` say in words what is wrong with an environment, and exit by it.

Every quirk is one of a real server made with OpenEnv.
"""

from functools import cache
from pathlib import Path

import pytest
import yaml
from quirky_server import quirky_server

from openenv_pipe.commands.findings import Result
from openenv_pipe.errors import PipeError
from openenv_pipe.extras.lab.check import check as check_module
from openenv_pipe.extras.lab.check import probe_environment
from openenv_pipe.extras.lab.inspect import UNTRAINABLE, inspect_environment
from openenv_pipe.extras.lab.targets import find_target

TUPLE = "step() returned a tuple; OpenEnv wants the observation alone"
# A quirk, and what the problem says that `inspect` finds.
UNTRAINABLE_QUIRKS = {
    "step returns a tuple": TUPLE,
    "step returns nothing": "step() returned nothing; OpenEnv wants the observation alone",
    "step returns a dict": "step() returned a dict",
    "step is a coroutine": "step() returned a coroutine, because it is `async def`",
    "step returns another model": "step() returned a Unlike",
    "every action raises": "all raised on the server: EXECUTION_ERROR: {",
    "done at reset": "SOME_KEY is not set",
    "reward is a text": "reward is 'great', expected null or a number",
}
# A quirk, and a note of `inspect`.
ODD_QUIRKS = {
    "": 'a task begins with {"text":"say 0"',
    "half of the actions raise": "bad luck",
    "half of the steps return a tuple": TUPLE,
    "reward is null": "always null",
    "never done": "no random episode was done within 64 turns",
    "done at random": "a task begins with",
    "needs a keyword": 'reads like a complaint: {"error":"reset needs the keyword `task`"',
    "empty": "the first observations of 4 tasks are the same",
    "huge": "a task begins with",
    "clock": "it is 20",
    "long game": "a task begins with",
}


@pytest.fixture(scope="module")
def url():
    with quirky_server() as url:
        yield url


def target(url: str, quirk: str, *more: str):
    return find_target(
        url, [f"+env.tasks.{each}.reset.quirk={quirk!r}" for each in SPLITS] + [*more]
    )


SPLITS = ("train", "eval")


def inspected(url: str, quirk: str):
    told: list[str] = []
    output = Path("conf/env/quirky.yaml")
    found = inspect_environment(target(url, quirk), output, told.append)
    assert any("random episodes played" in text for text in told) or found.problem
    assert (found.experiment is None) is (found.problem is not None)
    assert Path("conf/conf/quirky.yaml").exists() is (found.problem is None)
    first_line = output.read_text().splitlines()[0]
    assert first_line.startswith(f"# {UNTRAINABLE}: ") is (found.problem is not None)
    return found


@pytest.mark.parametrize("quirk", UNTRAINABLE_QUIRKS)
def test_an_environment_that_cannot_be_trained_is_not_recommended(
    url, quirk, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = inspected(url, quirk)
    assert UNTRAINABLE_QUIRKS[quirk] in found.problem
    assert "step_exception" not in yaml.safe_load(found.block)


@pytest.mark.parametrize("quirk", ODD_QUIRKS)
def test_what_is_odd_is_noted(url, quirk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = inspected(url, quirk)
    assert found.problem is None
    assert any(ODD_QUIRKS[quirk] in note for note in found.notes), found.notes
    assert "// Say the number that is wanted, as digits." in found.block
    if quirk == "long game":
        assert yaml.safe_load(found.for_model)["env"]["max_turns"] == 20


@pytest.mark.parametrize(
    ("quirk", "words"),
    [
        ("reset raises", "the data are not there"),
        ("reset returns a tuple", "reset() returned a tuple; OpenEnv wants"),
    ],
)
def test_a_reset_that_fails_is_explained(url, quirk, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipeError, match="EXECUTION_ERROR") as caught:
        inspected(url, quirk)
    assert words in str(caught.value)


def test_slow_resets_are_played_in_several_sessions(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inspected(url, "slow").problem is None


@cache
def checked(url: str, quirk: str):
    """Return the result and the text of each line of the probes that play, by name."""
    with pytest.MonkeyPatch.context() as patch:
        names = ("protocol", "sessions", "seeds", "rewards")
        patch.setattr(check_module, "PROBES", {name: check_module.PROBES[name] for name in names})
        lines = probe_environment(
            target(url, quirk), policy=None, num_episodes=1, notify=lambda _: None
        )
    return {line.name: (line.result, line.text) for line in lines}


@pytest.mark.parametrize(
    ("quirk", "name", "result", "words"),
    [
        ("step returns a tuple", "step", Result.FAIL, TUPLE),
        ("step is a coroutine", "step", Result.FAIL, "returned a coroutine"),
        ("every action raises", "step", Result.FAIL, "nothing shows that any action is accepted"),
        ("half of the actions raise", "step", Result.WARN, "bad luck"),
        ("half of the steps return a tuple", "step", Result.FAIL, TUPLE),
        ("done at reset", "reset", Result.FAIL, "SOME_KEY is not set"),
        ("done at reset", "step after done", Result.OK, "episodes are done at their reset"),
        ("reset raises", "reset", Result.FAIL, "the data are not there"),
        ("reset returns a tuple", "reset", Result.FAIL, "reset() returned a tuple"),
        ("needs a keyword", "reset", Result.WARN, "reset needs the keyword `task`"),
        ("reward is a text", "step", Result.FAIL, "reward is 'great'"),
        ("anything goes", "constant actions", Result.WARN, "one action that does not look"),
        ("clock", "same seed", Result.OK, "except for the clocks seconds_taken, text"),
        ("", "reset", Result.OK, "say 0"),
        ("", "constant actions", Result.OK, "of 16 tasks"),
    ],
)
def test_check_has_the_right_verdict(url, quirk, name, result, words):
    found = checked(url, quirk)
    assert found[name][0] is result, found
    assert words in found[name][1]


def test_a_server_of_one_session_is_inspected_and_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with quirky_server(num_sessions=1) as url:
        assert inspected(url, "").problem is None
        assert checked(url, "")["sessions"][0] is Result.OK
