"""A test that hangs is named, with its stack, and the other tests of its file still run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = """
import threading


def test_before():
    pass


def test_that_hangs():
    threading.Event().wait()


def test_after():
    pass
"""


def test_a_test_that_hangs_ends_alone(tmp_path):
    for name in ("test_first.py", "test_second.py", "test_third.py"):
        (tmp_path / name).write_text(FILE)
    settings = ("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-o", "pythonpath=")
    plugins = ("-p", "no:cacheprovider", "-p", "tests.conftest")
    short = ("-o", "faulthandler_timeout=1")
    spread = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *plugins, *short, *spread, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "3 failed, 6 passed" in result.stdout
    for name in ("first", "second", "third"):
        assert result.stdout.count(f"crashed while running 'test_{name}.py::test_that_hangs'") == 1
        assert f'test_{name}.py", line 10 in test_that_hangs' in result.stderr
