"""Python's collector while a command starts and when a run begins, and malloc."""

import gc
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from openenv_pipe.cli.control import controlled
from openenv_pipe.cli.main import main
from openenv_pipe.system.process_settings import WHILE_IMPORTING

pytestmark = pytest.mark.slow

SIZE_MB, PAGE_KB = 16, 4
TWICE = f"""
import resource
from openenv_pipe.system.process_settings import keep_freed_memory

keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray({SIZE_MB} << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_what_was_freed_is_not_fetched_again():
    """Each page that the process fetches from the system costs a page fault."""
    child = subprocess.run(
        [sys.executable, "-c", TWICE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert int(child.stdout) < SIZE_MB * 1024 / PAGE_KB / 8
