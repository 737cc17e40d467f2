"""The worker of a sweep: one process for many jobs, its death, its stop, and what jobs leave."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from openenv_pipe.extras.sweeps import worker as worker_module
from openenv_pipe.extras.sweeps.worker import INTERRUPTED, Worker, WorkerJob
from openenv_pipe.extras.sweeps.worker_process import OneStop, Surroundings

LIMIT_S = 60.0  # waits for what takes a moment on an idle machine
ROOT = Path(__file__).parents[4]
MODULE = "tests.sweep_worker"
WHERE = "import os; print('from', os.getpid())"
UNTIL_STOP = """
import asyncio, os
async def work():
    print("up", os.getpid(), flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.1)
        print("saved", flush=True)
stop.run(work())
"""


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(worker_module, "MODULE", MODULE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = Worker(servers=None)
    yield found
    found.close()


@pytest.fixture
def run(worker, tmp_path):
    """Run code as a job, and return its exit code and its output."""
    numbers = iter(range(100))

    def run_code(code, is_stopped=lambda log: False, **secrets):
        path = tmp_path / f"job{next(numbers)}"
        path.write_text(code)
        log = path.with_suffix(".log")
        job = WorkerJob(run=str(path), resumes=False, secrets=secrets)
        exit_code = worker.run(job, log, lambda: is_stopped(log))
        return exit_code, log.read_text() if log.exists() else ""

    return run_code


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)
    return found


def is_up(log):
    return log.exists() and "up" in log.read_text()


def process_in(output: str) -> psutil.Process:
    return psutil.Process(int(output.split()[1]))


def test_jobs_run_in_one_process_and_print_to_logs_of_their_own(run):
    code = f"{WHERE}\nos.write(2, b'of no Python stream')"
    (code_1, first), (code_2, second) = run(code), run(code)
    assert code_1 == code_2 == 0
    assert first == second
    assert first.count("of no Python stream") == 1


@pytest.mark.parametrize(
    ("code", "exit_code", "output"),
    [
        ("from openenv_pipe.errors import ConfigError; raise ConfigError('no')", 2, "error: no\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, ""),
    ],
)
def test_a_job_after_a_failed_one_gets_a_new_process(run, code, exit_code, output):
    failed = run(f"{WHERE}\nimport sys; sys.stdout.flush()\n{code}")
    assert failed[0] == exit_code
    assert output in failed[1]
    assert run(WHERE)[1] != failed[1].splitlines(keepends=True)[0]


def test_a_secret_is_a_variable_of_its_job_only_and_is_not_in_the_log(run, monkeypatch):
    secret = "tok-0123456789"
    monkeypatch.setenv("KNOWN_TOKEN", secret)
    code = "import os; print(os.environ.get('MY_TOKEN'))"
    assert run(code, MY_TOKEN=secret) == (0, "<hidden: KNOWN_TOKEN>\n")
    assert run(code) == (0, "None\n")


def test_a_stopped_job_saves_and_leaves_the_process_to_the_next(run):
    exit_code, output = run(UNTIL_STOP, is_up)
    assert exit_code == INTERRUPTED
    assert output.split()[::2] == ["up", "saved"]
    assert run(WHERE)[1].split()[1] == output.split()[1]


def test_a_job_that_does_not_stop_is_killed(run, monkeypatch):
    monkeypatch.setattr(worker_module, "STOP_LIMIT_S", 0.1)
    code = "import os, time; print('up', os.getpid(), flush=True); time.sleep(600)"
    exit_code, output = run(code, is_up)
    assert exit_code is None
    assert not psutil.pid_exists(int(output.split()[1]))


def test_a_job_that_is_stopped_during_the_imports_does_not_begin(run, worker, monkeypatch):
    monkeypatch.setenv("SECONDS_OF_IMPORTS", "600")
    before = psutil.Process().children()
    assert run("print('began')", lambda log: True) == (None, "")
    assert psutil.Process().children() == before


def test_changed_code_gets_a_new_process(run, monkeypatch):
    """A run's record names the code that it has run."""
    digests = ["one"]
    monkeypatch.setattr(worker_module, "find_code_digest", lambda: digests[-1])
    first = run(WHERE)
    assert run(WHERE) == first
    digests.append("another")
    assert run(WHERE) != first


def test_a_process_that_cannot_import_says_why(run, monkeypatch):
    monkeypatch.setattr(worker_module, "MODULE", "tests.no_such_module")
    exit_code, output = run(WHERE)
    assert exit_code == 1
    assert "No module named tests.no_such_module" in output


def test_what_user_code_leaves_behind_does_not_delay_the_end_of_a_job(run):
    code = "import subprocess; subprocess.Popen(['sleep', '600']); print('done')"
    assert run(code) == (0, "done\n")


OWNER = """
import sys
from pathlib import Path
from openenv_pipe.extras.sweeps import worker
worker.MODULE, code, log = sys.argv[1:]
job = worker.WorkerJob(run=code, resumes=False, secrets={})
worker.Worker(servers=None).run(job, Path(log), lambda: False)
"""


def test_nothing_is_left_of_a_killed_sweep(tmp_path):
    """Its job is asked to stop, and saves."""
    code, saved = tmp_path / "code", tmp_path / "saved"
    code.write_text(UNTIL_STOP.replace('print("saved", flush=True)', f"open({str(saved)!r}, 'w')"))
    command = [sys.executable, "-c", OWNER, MODULE, str(code), str(tmp_path / "log")]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as owner:
        try:
            wait_for(lambda: is_up(tmp_path / "log"), "the job")
            job = process_in((tmp_path / "log").read_text())
        finally:
            owner.kill()
    wait_for(lambda: not job.is_running(), "the end of the job's process")
    assert saved.exists()


def test_only_the_first_request_to_stop_counts():
    """A second one would cut the saving short."""
    stop, cancelled = OneStop(), []
    stop._cancel = lambda: cancelled.append(True)
    stop.make()
    stop.make()
    assert cancelled == [True]


def test_the_next_job_finds_what_a_process_of_its_own_would(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    before = torch.initial_seed()
    (tmp_path / "users_module.py").write_text("state = []\n")
    surroundings = Surroundings()
    drawn = []
    for _ in range(2):
        import sched  # of the standard library

        import users_module

        users_module.state.append(random.random())
        assert len(users_module.state) == 1
        assert "LEFT" not in os.environ
        assert Path.cwd() == tmp_path
        assert "/left" not in sys.path
        os.environ["LEFT"] = "1"
        os.chdir("/")
        sys.path.append("/left")
        surroundings.restore()
        assert sys.modules["sched"] is sched
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]
    torch.manual_seed(before)
