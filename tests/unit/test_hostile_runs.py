"""A sample of the run folders of `hostile_runs.py`, and the commands that read them.

All of them: python -m tests.hostile_runs
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 600
# One of each kind, and the commands that read most of a folder. The largest files are left to all.
CASES = (
    "gzip zeros episodes/step_000001|rows valid 20000|gzip members|json objects eval/start.json"
    "|json keys run.json|sparse config.json|metrics 200000|tokenizer strip"
    "|link logs/attempt_9 folder|name escape eval|index link episode_index.sqlite-shm"
    "|special episodes socket|image link"
)


@pytest.mark.parametrize("commands", ["^pages$|^runs$", "^bundle$|^record$|^compare$"])
def test_hostile_folders_leak_nothing_and_take_little(commands):
    # Beside other work, the same instructions take up to twice the time of the processor.
    bounds = [f"^({CASES})$", commands, "25"]
    command = [sys.executable, "-m", "tests.hostile_runs", *bounds]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert ", 0 bad;" in done.stdout
