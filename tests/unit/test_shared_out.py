"""A test in which a worker of pytest-xdist dies fails once, at once, and all others run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.shared_out import Scheduling

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PLUGIN = """
from tests.shared_out import FailuresAtOnce, Scheduling, name_interrupted as pytest_terminal_summary


def pytest_xdist_make_scheduler(config, log):
    config.pluginmanager.register(FailuresAtOnce(config))
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
FORK = """
import os
import time
from pathlib import Path


def test_that_leaves_a_fork_behind():
    if (fork := os.fork()) == 0:
        time.sleep(600)
    Path("new").write_text(str(fork))
    Path("new").rename("fork")
    os._exit(1)


def test_after():
    pass
"""
# Other plugins take longer to start than all of these tests.
COMMAND = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "--dist", "loadfile"]
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def test_the_test_in_which_a_worker_dies_fails_once(tmp_path):
    _write(tmp_path, first=TESTS, second=TESTS, third=TESTS)
    result = subprocess.run(
        COMMAND, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert "3 failed, 6 passed" in result.stdout, result.stdout + result.stderr
    at_once, _, end = result.stdout.partition("= FAILURES =")
    for name in ("first", "second", "third"):
        assert f"FAILED test_{name}.py::test_that_dies - worker" in at_once
        assert f"crashed while running 'test_{name}.py::test_that_dies'" in end


def test_a_test_whose_worker_died_behind_a_fork_is_named_at_an_interrupt(tmp_path):
    """The fork holds the pipe of its worker, and so keeps pytest from noticing the death."""
    _write(tmp_path, forks=FORK)
    with (tmp_path / "output").open("wb") as output:
        controller = subprocess.Popen(
            COMMAND, cwd=tmp_path, env=ENVIRONMENT, stdout=output, stderr=output
        )
    while not (tmp_path / "fork").exists():
        assert controller.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.05)
    try:
        controller.send_signal(signal.SIGINT)
        controller.wait(timeout=300)
    finally:
        os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)
    named = "INTERRUPTED test_forks.py::test_that_leaves_a_fork_behind"
    assert named in (tmp_path / "output").read_text()


class Worker:
    shutting_down = False
    gateway = SimpleNamespace(id="gw")

    def __init__(self, *, is_dead: bool) -> None:
        self.is_dead, self.sent = is_dead, []

    def send_runtest_some(self, indices) -> None:
        if self.is_dead:
            raise OSError("cannot send (already closed?)")
        self.sent += indices

    def shutdown(self) -> None:
        pass


def test_the_tests_that_a_dead_worker_was_sent_are_left_to_another_one():
    options = SimpleNamespace(loadscopereorder=False)
    config = SimpleNamespace(getvalue=lambda _: ["2*popen"], option=options)
    scheduling = Scheduling(config, None, server_of=lambda _: None)
    tests = ["a.py::test_1", "a.py::test_2", "b.py::test_1"]
    dead, alive = Worker(is_dead=True), Worker(is_dead=False)
    for worker in (dead, alive):
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    assert scheduling.remove_node(dead) == "a.py::test_1"
    assert [tests[index] for index in alive.sent] == tests[:0:-1]


def _write(folder: Path, **files: str) -> None:
    (folder / "conftest.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)


def test_a_test_that_hangs_ends_its_worker(pytestconfig):
    """pytest prints where its threads are, and names the test (faulthandler_timeout)."""
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
    assert pytestconfig.getini("faulthandler_timeout") > 0
