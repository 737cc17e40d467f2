"""Parts of a run named by `target` and `options`: how they are built, and what is rejected."""

from functools import partial
from pathlib import Path
from typing import Protocol

import pytest
from fakes import run_config

from openenv_pipe.config.schema import PythonTarget
from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.pipeline.facts import _callables, _env_functions
from openenv_pipe.system.files import digest_of_file
from openenv_pipe.system.python_targets import build_part, load_function


class Contract(Protocol):
    """A protocol like those of the package: an attribute, a property and a method."""

    size: int

    @property
    def name(self) -> str: ...

    def act(self) -> None: ...


class Whole:
    size = 3

    def __init__(self, folder, *, name="none"):
        self.folder, self.name = folder, name

    def act(self):
        """Do nothing."""


class Half:
    size = 3


class Unready(Whole):
    """A part with a property that can be read later."""

    def __init__(self):
        """Set nothing."""

    @property
    def name(self):
        raise RuntimeError("it has no name before it has begun")


def make_half():
    return Half()


async def later():
    return Half()


def broken():
    raise KeyError("MY_VARIABLE")


def unreachable():
    raise HostError("nobody answers")


def scaled(value, *, scale=1.0):
    return scale * value


def block(name, /, **options):
    return PythonTarget(type="python", target=f"{__name__}:{name}", options=options)


def test_a_part_gets_the_arguments_and_its_options():
    part = build_part("tracker", block("Whole", name="mine"), Contract, "a folder")
    assert (part.folder, part.name) == ("a folder", "mine")


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        (block("Half"), [], ["Half without act", "test_python_targets.Contract"]),
        (block("make_half"), [], ["Half without name, act", "test_python_targets.Contract"]),
        (block("later"), [], ["an async function"]),
        (block("Whole", colour=1), ["x"], ["'colour'", "1 argument and the options [colour]"]),
        (block("Whole"), [], ["'folder'", "0 arguments"]),
        (block("broken"), [], ["raised KeyError", "MY_VARIABLE"]),
        (block("Missing"), [], ["there is no 'Missing'"]),
    ],
)
def test_what_cannot_be_a_part_is_rejected_by_its_key(target, arguments, words):
    with pytest.raises(ConfigError) as rejected:
        build_part("host", target, Contract, *arguments)
    for word in [target.target, *words]:
        assert word in str(rejected.value)


def test_a_property_is_not_read_when_a_part_is_made():
    assert build_part("host", block("Unready"), Contract).size == 3


def test_options_are_named_without_their_values():
    with pytest.raises(ConfigError) as rejected:
        build_part("tracker", block("broken", api_key="very-secret-value"), Contract)
    assert "api_key" in str(rejected.value)
    assert "very-secret-value" not in str(rejected.value)


def test_errors_that_are_meant_for_people_stay_what_they_are():
    with pytest.raises(HostError, match="nobody answers"):
        build_part("host", block("unreachable"), Contract)


def test_a_function_is_loaded_with_the_options_that_it_takes():
    found = load_function("trainer.loss", block("scaled", scale=2.0), 1)
    # Not the same object if another test has made this module be imported again.
    assert found.__code__ == scaled.__code__


@pytest.mark.parametrize(("options", "number"), [({"size": 1}, 1), ({}, 2)])
def test_a_function_that_takes_something_else_is_rejected_before_it_is_called(options, number):
    with pytest.raises(ConfigError, match=r"trainer\.loss\.target=.* cannot be called with"):
        load_function("trainer.loss", block("scaled", **options), number)


def test_a_class_is_no_function():
    with pytest.raises(ConfigError, match=r"Whole' is a class; expected a function"):
        load_function("trainer.loss", block("Whole"), 1)


class Doubling:
    def __call__(self, value):
        return 2.0 * value


doubled = Doubling()
halved = partial(pow, exp=-1)


@pytest.mark.parametrize("attribute", ["broken", "Half", "doubled", "halved"])
def test_a_target_s_file_is_recorded_whatever_kind_of_callable_it_is(attribute):
    target = f"{__name__}:{attribute}"
    config = run_config({"trainer.warm_start.source.policy": target})
    assert _callables(config)[target] == digest_of_file(Path(__file__))


def test_the_file_of_a_function_that_an_environment_imports_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_scores").mkdir()
    file = tmp_path / "my_scores/exact.py"
    file.write_text("raise RuntimeError('only the environment imports it')\n")
    config = run_config(
        {"env.variables": {"SCORE": "my_scores.exact:score", "URL": "http://127.0.0.1:80"}}
    )
    assert _env_functions(config) == {"my_scores.exact:score": digest_of_file(file)}
