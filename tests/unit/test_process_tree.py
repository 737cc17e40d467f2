"""No descendant of a `ManagedProcess` outlives it or its parent, however the parent ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from openenv_pipe.system.process import ManagedProcess

LIMIT_S = 60.0  # waits for what takes a moment on an idle machine
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

# A command with a child in its own group, a child in a new session, and a daemon detached by a
# double fork. All of them ignore SIGTERM, SIGINT and SIGHUP.
FAMILY = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
folder = sys.argv[1]
def live(name):
    with open(f"{folder}/{name}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{name}.part", f"{folder}/{name}.pid")
    time.sleep(600)
if os.fork() == 0:
    live("child")
if os.fork() == 0:
    os.setsid()
    live("other_session")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        live("daemon")
    os._exit(0)
if len(sys.argv) > 2:  # die and leave the others behind
    while len([name for name in os.listdir(folder) if name.endswith(".pid")]) < 3:
        time.sleep(0.01)
    os._exit(3)
live("command")
"""

# A parent that starts these processes and waits, or forks a worker that keeps the pipe open.
PARENT = """
import os, signal, sys, threading, time
from pathlib import Path
from openenv_pipe.system.process import ManagedProcess
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
family, folder, how = sys.argv[1:]
scratch = Path(folder, "scratch")
(scratch / "inner").mkdir(parents=True)
def start():
    global process
    process = ManagedProcess([sys.executable, "-c", family, folder], scratch=scratch,
                             log=Path(folder) / "log", environment=os.environ, grace_s=0.3)
thread = threading.Thread(target=start)
thread.start()
thread.join()
if how == "forks" and os.fork() == 0:
    Path(folder, "worker.part").write_text(str(os.getpid()))
    Path(folder, "worker.part").rename(Path(folder, "worker.txt"))
    time.sleep(600)
if how == "exits":
    while len(list(Path(folder).glob("*.pid"))) < 4:
        time.sleep(0.01)
    sys.exit()
time.sleep(600)
"""


def family_pids(folder, num_members=4):
    """Wait until all members are up, and return their process ids."""
    deadline = time.monotonic() + LIMIT_S
    while len(files := list(folder.glob("*.pid"))) < num_members:
        assert time.monotonic() < deadline, f"only {files} are up"
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_all_end(pids, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while survivors := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {survivors}"
        time.sleep(0.02)


def assert_goes(folder):
    deadline = time.monotonic() + LIMIT_S
    while folder.exists():
        assert time.monotonic() < deadline, f"{folder} is still there"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_survivors(tmp_path):
    """Ends the processes that a failed test, or a killed guardian, has left alive."""
    yield
    for file in tmp_path.glob("*.pid"):
        if is_alive(pid := int(file.read_text())):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def parent(tmp_path):
    """Start a parent; the fixture kills it at the end."""
    started = []

    def start_parent(how="waits"):
        command = [sys.executable, "-c", PARENT, FAMILY, str(tmp_path), how]
        started.append(subprocess.Popen(command, cwd=ROOT))
        return started[-1]

    yield start_parent
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_a_killed_parent(parent, tmp_path, number):
    process = parent()
    pids = family_pids(tmp_path)
    process.send_signal(number)
    process.wait(LIMIT_S)
    assert_all_end(pids)
    assert_goes(tmp_path / "scratch")


def test_nothing_survives_a_parent_that_exits(parent, tmp_path):
    process = parent("exits")
    assert process.wait(LIMIT_S) == 0
    assert_all_end(family_pids(tmp_path))


def test_nothing_survives_when_a_fork_of_the_parent_keeps_the_pipe(parent, tmp_path):
    process = parent("forks")
    pids = family_pids(tmp_path)
    worker = tmp_path / "worker.txt"
    while not worker.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait(LIMIT_S)
    try:
        assert_all_end(pids)
    finally:
        os.kill(int(worker.read_text()), signal.SIGKILL)


@pytest.fixture
def family(tmp_path):
    """Start the processes below this one; the fixture stops them at the end."""
    started = []

    def start_family(*arguments):
        command = [sys.executable, "-c", FAMILY, str(tmp_path), *arguments]
        log = tmp_path / "log"
        started.append(ManagedProcess(command, log=log, environment=os.environ, grace_s=0.2))
        return started[-1]

    yield start_family
    for process in started:
        process.stop(0)


def test_stop_ends_the_whole_tree(family, tmp_path):
    process = family()
    pids = family_pids(tmp_path)
    assert process.stop(0.2) == 128 + signal.SIGKILL
    assert not any(map(is_alive, pids))


def test_the_death_of_the_command_ends_what_it_left_behind(family, tmp_path):
    process = family("dies")
    assert process.wait(LIMIT_S) == 3
    assert not any(map(is_alive, family_pids(tmp_path, num_members=3)))


def test_sigterm_to_the_guardian_ends_the_whole_tree(family, tmp_path):
    process = family()
    pids = family_pids(tmp_path)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert not any(map(is_alive, pids))


def test_sigkill_to_the_guardian_ends_the_command(family, tmp_path):
    process = family()
    family_pids(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(LIMIT_S)
    assert_all_end([int((tmp_path / "command.pid").read_text())])


def test_the_end_of_the_thread_that_started_it_does_not_end_the_command(family, tmp_path):
    thread = threading.Thread(target=family)
    thread.start()
    thread.join()
    pids = family_pids(tmp_path)
    time.sleep(0.2)
    assert all(map(is_alive, pids))


SHARING = """
import multiprocessing, os, signal, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(memory.name, "sem." + semaphore._semlock.name.removeprefix("/"), flush=True)
if sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["dies", "is stopped"])
def test_shared_memory_of_killed_processes_is_removed(tmp_path, end):
    """vLLM's processes share memory and semaphores by these means."""
    log = tmp_path / "log"
    process = ManagedProcess(
        [sys.executable, "-c", SHARING, end], log=log, environment=os.environ, grace_s=0.0
    )
    deadline = time.monotonic() + LIMIT_S
    while len(names := log.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if end == "dies":
        process.wait(LIMIT_S)
    assert process.stop(0.1) == 128 + signal.SIGKILL
    assert [name for name in names if Path("/dev/shm", name).exists()] == []
