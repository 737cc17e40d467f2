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
LEFT = """
import gc
import resource
from openenv_pipe.system.process_settings import give_back_memory, keep_freed_memory

keep_freed_memory()
gc.disable()

class Model:
    def __init__(self):
        self.itself = self
        self.weights = b"x" * (8 << 20)

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20

before = resident_mb()
models = [Model() for _ in range(20)]
kept = [b"x" * 1000 for _ in range(100)]  # above the models in the heap
del models
held = resident_mb() - before
give_back_memory()
print(held, resident_mb() - before)
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


of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")


@of_glibc
def test_what_was_freed_is_not_fetched_again():
    """Each page that the process fetches from the system costs a page fault."""
    (faults,) = numbers_of(TWICE)
    assert faults < SIZE_MB * 1024 / PAGE_KB / 8


@of_glibc
def test_a_model_that_is_done_with_is_given_back_at_the_end_of_a_call():
    """It is in a cycle, and its memory is below other blocks of the heap."""
    held_mb, left_mb = numbers_of(LEFT)
    assert held_mb > 150 and left_mb < 20


def numbers_of(code: str) -> list[float]:
    """Return what the code prints in a process of its own."""
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return [float(number) for number in child.stdout.split()]
