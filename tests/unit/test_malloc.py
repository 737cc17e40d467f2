"""malloc keeps freed memory and reuses it."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

SIZE_MB, PAGE_KB = 16, 4
TWICE = f"""
import resource
from openenv_pipe.system.malloc import keep_freed_memory

keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray({SIZE_MB} << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


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
