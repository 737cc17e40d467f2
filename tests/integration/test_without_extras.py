"""Each extra is one folder: without it, the tests of the core and a run pass."""

import os
import shutil
import subprocess
import sys

import pytest
from commands import REPOSITORY

from openenv_pipe.registry import extras

# Quick ones, of what names, builds or calls the parts that extras bring.
TESTS = ("registry", "rollout", "losses", "run_folder")
LIMIT_S = 600.0


def ended(folder, *arguments):
    """Run Python in a folder, whose package it imports; return the exit code and the output."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return result.returncode, result.stdout


@pytest.mark.parametrize("extra", [extra.name for extra in extras()])
def test_the_core_does_without_an_extra(extra, tmp_path):
    for name in ("openenv_pipe", "conf", "envs", "tests"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    shutil.rmtree(tmp_path / "openenv_pipe/extras" / extra)
    shutil.rmtree(tmp_path / "tests/unit/extras" / extra, ignore_errors=True)
    listing = "from openenv_pipe.registry import extras; print(*[each.name for each in extras()])"
    code, out = ended(tmp_path, "-c", listing)
    assert code == 0 and extra not in out.split()
    tests = [f"tests/unit/test_{name}.py" for name in TESTS]
    code, out = ended(tmp_path, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    assert code == 0, out
    code, out = ended(tmp_path, "-m", "openenv_pipe.cli.main", "train", "conf=smoke")
    assert code == 0, out
