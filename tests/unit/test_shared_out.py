"""A test in which a worker of pytest-xdist dies fails once, and all others run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN = """
from tests.shared_out import Scheduling


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log, lambda path: None)
"""
TESTS = """
import os


def test_before():
    pass


def test_that_dies():
    os._exit(1)


def test_after():
    pass
"""


def test_the_test_in_which_a_worker_dies_fails_once(tmp_path):
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    for name in ("first", "second", "third"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 failed, 6 passed" in result.stdout, result.stdout + result.stderr
    for name in ("first", "second", "third"):
        assert result.stdout.count(f"crashed while running 'test_{name}.py::test_that_dies'") == 1


def test_a_test_that_hangs_ends_its_worker(pytestconfig):
    """pytest prints where its threads are, and names the test (faulthandler_timeout)."""
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
    assert pytestconfig.getini("faulthandler_timeout") > 0
