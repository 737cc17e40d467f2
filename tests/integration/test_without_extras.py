"""Each extra is one folder: without it, tests of the core and a run pass.

`unit/test_imports.py` shows that the core names no extra.
"""

import os
import shutil
import subprocess
import sys

import pytest
from commands import REPOSITORY

from openenv_pipe.registry import extras

# One process runs all of it, and imports the libraries once.
TESTS = ["tests/unit/test_registry.py", "test_alone.py"]
ALONE = """
import pytest

from openenv_pipe.cli.main import main
from openenv_pipe.registry import extras


def test_the_extra_is_missing_and_a_run_ends():
    assert {extra!r} not in [each.name for each in extras()]
    with pytest.raises(SystemExit, match="^0$"):
        main(["train", "conf=smoke", "trainer.steps=1", "eval.baselines=false"])
"""
LIMIT_S = 600.0


@pytest.mark.parametrize("extra", [extra.name for extra in extras()])
def test_the_core_does_without_an_extra(extra, tmp_path):
    for name in ("openenv_pipe", "conf", "envs", "tests"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    shutil.rmtree(tmp_path / "openenv_pipe/extras" / extra)
    shutil.rmtree(tmp_path / "tests/unit/extras" / extra, ignore_errors=True)
    (tmp_path / "test_alone.py").write_text(ALONE.format(extra=extra))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert list(tmp_path.glob("runs/smoke/0001/report.md"))
