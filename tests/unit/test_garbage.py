"""Python's collector while a command starts, and when a run begins."""

import gc
import weakref

import pytest

from openenv_pipe.cli.control import controlled
from openenv_pipe.cli.main import main
from openenv_pipe.system.garbage import WHILE_IMPORTING


class Loop:
    """Is reachable by itself only, once it is made."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def usual():
    """The thresholds before the test, which `conftest.py` has made the usual ones."""
    yield gc.get_threshold()
    gc.unfreeze()


def test_a_command_starts_with_few_collections_and_a_run_has_the_usual_ones(usual, capsys):
    main_exits(["--version"])
    assert gc.get_threshold() == WHILE_IMPORTING
    with controlled():
        assert gc.get_threshold() == usual
        assert gc.get_freeze_count() > 0


def test_what_a_run_makes_is_collected(capsys):
    main_exits(["--version"])
    with controlled():
        found = weakref.ref(Loop())
        gc.collect()
        assert found() is None


def main_exits(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 0
