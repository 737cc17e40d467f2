"""Commands that are forked from a prepared process, in place of commands that are executed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from openenv_pipe.commands.sweep import prepared
from openenv_pipe.system.fork_server import ForkServer, can_fork
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.process_id import ProcessId

LIMIT_S = 60.0  # waits for what takes a moment on an idle machine
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not can_fork(), reason="forks are for Linux only")

# The server: what it has imported is `prepared`, and its forks execute the code they are given.
SERVER = """
import os, sys
from openenv_pipe.commands.sweep import prepared
from openenv_pipe.system.fork_server import serve
def prepare():
    global prepared
    import numpy
    prepared = os.getpid()
command = serve(sys.argv[1:], prepare)
exec(command[-1])
"""
WITHOUT_SERVER = "prepared = globals().get('prepared')\n"  # where the code is executed by itself


@pytest.fixture
def server():
    """A server that is ready, and is ended with the test."""
    found = ForkServer([sys.executable, "-c", SERVER], environment_here())
    assert wait_for(lambda: found.settled(0.1), "the server")
    yield found
    found.close()


@pytest.fixture
def start(server, tmp_path):
    """Start code from the server; the fixture stops all of it at the end."""
    started = []

    def start_code(code, **options):
        given = {"log": tmp_path / "log", "environment": environment_here()} | options
        command = [sys.executable, "-c", WITHOUT_SERVER + code]
        started.append(ManagedProcess(command, fork_server=server, **given))
        return started[-1]

    yield start_code
    for process in started:
        process.stop(0)


def environment_here(**more: str) -> dict[str, str]:
    """Return the variables of this process, without the one that pytest changes."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    variables.pop("PYTEST_CURRENT_TEST", None)
    return variables


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)
    return found


def wait_for_text(log, text):
    wait_for(lambda: log.exists() and text in log.read_text(), f"{text!r} in {log}")


def test_a_fork_has_what_the_server_has_imported(start, server, tmp_path):
    process = start("print('from', prepared)")
    assert process.wait(LIMIT_S) == 0
    assert (tmp_path / "log").read_text() == f"from {server.pid}\n"


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
        ("1 / 0", 1),
    ],
)
def test_the_return_code_is_the_commands(start, code, returncode):
    process = start(code)
    assert process.wait(LIMIT_S) == returncode
    assert process.returncode == returncode
    assert not process.alive


def test_a_fork_has_the_signals_and_files_of_an_executed_command(start, server, tmp_path):
    code = """
import os, signal
print([(each.name, str(signal.getsignal(each)).split(' at ')[0]) for each in signal.valid_signals()
       if isinstance(each, signal.Signals)], signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getppid(), os.readlink("/proc/self/fd/0"))
for name in sorted(os.listdir("/proc/self/fd"), key=int):
    if os.path.exists(f"/proc/self/fd/{name}"):
        print(name)
"""
    assert start(code, log=tmp_path / "forked").wait(LIMIT_S) == 0
    server.close()
    assert start(code, log=tmp_path / "executed").wait(LIMIT_S) == 0
    assert (tmp_path / "forked").read_text() == (tmp_path / "executed").read_text()


def test_secrets_are_in_the_environment_of_the_command_only(start, tmp_path, monkeypatch):
    secret = "tok-0123456789"
    monkeypatch.setenv("MY_TOKEN", secret)
    code = "import os, time; print(os.environ['MY_TOKEN'], flush=True); time.sleep(600)"
    start(code, environment=environment_here(MY_TOKEN=secret))
    wait_for_text(tmp_path / "log", "\n")
    assert (tmp_path / "log").read_text() == "<hidden: MY_TOKEN>\n"
    assert secret not in "".join(" ".join(each) for each in command_lines())


def command_lines():
    for process in psutil.process_iter():
        try:
            yield process.cmdline()
        except psutil.Error:
            continue


def test_variables_of_the_command_are_all_that_it_has(start, tmp_path):
    process = start("import os; print(dict(os.environ))", environment={"A": "1"})
    assert process.wait(LIMIT_S) == 0
    assert (tmp_path / "log").read_text() == "{'A': '1'}\n"


def test_only_a_command_of_the_same_variables_and_folder_fits(server, tmp_path, monkeypatch):
    same = environment_here()
    assert server.fits(same)
    assert not server.fits({**same, "OMP_NUM_THREADS": "77"})
    assert not server.fits({name: same[name] for name in same if name != "PATH"})
    assert not server.fits({**same, "A_KEY": "1"})
    assert server.fits({**same, "A_KEY": "1"}, {"A_KEY"})
    monkeypatch.chdir(tmp_path)
    assert not server.fits(same)


def test_stop_lets_the_command_clean_up(start, tmp_path):
    code = """
import signal, sys, time
def clean_up(*_):
    print("clean", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, clean_up)
print("up", flush=True)
while True:
    time.sleep(600)
"""
    process = start(code)
    wait_for_text(tmp_path / "log", "up")
    assert process.stop(LIMIT_S) == 5
    assert (tmp_path / "log").read_text().split() == ["up", "clean"]


def test_stop_kills_what_ignores_it_in_another_session(start, tmp_path):
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
while True:
    time.sleep(600)
"""
    process = start(code)
    wait_for_text(tmp_path / "log", "\n")
    child = int((tmp_path / "log").read_text())
    assert is_alive(child)
    assert process.stop(0.1) == 128 + signal.SIGKILL
    wait_for(lambda: not is_alive(child), "the child's end")


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_fork_goes_on_without_its_server(start, server, tmp_path):
    code = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
    process = start(code)
    wait_for_text(tmp_path / "log", "up")
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(server.pid), "the server's end")
    assert process.wait(1.5) is None  # longer than the guardian takes to look for its owner
    assert process.stop(LIMIT_S) == 128 + signal.SIGTERM


def test_forks_draw_numbers_of_their_own(start, tmp_path):
    """As commands that are executed do, where nothing is seeded."""
    for number in range(2):
        drawn = start(
            "import numpy, random; print(random.random(), numpy.random.random())",
            log=tmp_path / f"log{number}",
        )
        assert drawn.wait(LIMIT_S) == 0
    one, other = ((tmp_path / f"log{number}").read_text().split() for number in range(2))
    assert len({*one, *other}) == 4


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_without_its_server_a_command_is_executed(start, server, tmp_path, how):
    if how == "killed":
        os.kill(server.pid, signal.SIGKILL)
    else:
        server.close()
    assert start("print('from', prepared)").wait(LIMIT_S) == 0
    assert (tmp_path / "log").read_text() == "from None\n"


@pytest.mark.parametrize("code", ["raise ImportError", "import os; os.kill(os.getpid(), 9)"])
def test_a_server_that_cannot_import_has_failed(tmp_path, code):
    server = ForkServer([sys.executable, "-c", code], environment_here())
    try:
        assert wait_for(lambda: server.settled(0.1), "the server's end")
        command = [sys.executable, "-c", "print('executed')"]
        process = ManagedProcess(
            command, log=tmp_path / "log", environment=os.environ, fork_server=server
        )
        process.wait(LIMIT_S)
        assert process.stop(0) == 0
    finally:
        server.close()
    assert (tmp_path / "log").read_text() == "executed\n"


def test_a_server_that_does_not_answer_is_killed(start, server, tmp_path, monkeypatch):
    monkeypatch.setattr("openenv_pipe.system.fork_server.START_LIMIT_S", 0.1)
    os.kill(server.pid, signal.SIGSTOP)
    assert start("print('from', prepared)").wait(LIMIT_S) == 0
    assert (tmp_path / "log").read_text() == "from None\n"
    assert not is_alive(server.pid)


def test_a_killed_guardian_takes_the_command_with_it(start, tmp_path):
    process = start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    wait_for_text(tmp_path / "log", "\n")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    pid = int((tmp_path / "log").read_text())
    wait_for(lambda: not is_alive(pid), "the command's end")


# An owner whose command asks to be told of its end, and whose worker keeps all pipes open.
OWNER = """
import os, sys, time
from pathlib import Path
from openenv_pipe.commands.sweep import prepared
from openenv_pipe.system.fork_server import ForkServer
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.process_id import ProcessId
server_code, command_code, log = sys.argv[1:]
server = ForkServer([sys.executable, "-c", server_code], os.environ)
if command_code:
    while not server.settled(1.0):
        pass
    process = ManagedProcess([sys.executable, "-c", command_code], log=Path(log),
                             environment=os.environ, grace_s=60.0, fork_server=server)
worker = os.fork()
if worker == 0:
    time.sleep(600)
print(server.pid, worker, flush=True)
time.sleep(600)
"""
SAVING = """
import os, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", os.getpid(), flush=True)
while True:
    time.sleep(600)
"""
SLOW_IMPORT = SERVER.replace("prepared = os.getpid()", "import time; time.sleep(600)")


def begin_owner(server_code, command_code, log):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, server_code, command_code, str(log)],
        env=environment_here(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    return owner, *map(int, owner.stdout.readline().split())


def test_nothing_is_left_of_a_killed_owner(tmp_path):
    """The command is asked once to end, and may save. A fork of the owner keeps its pipes open."""
    log = tmp_path / "log"
    owner, server, worker = begin_owner(SERVER, SAVING, log)
    try:
        wait_for_text(log, "up")
        owner.kill()
        wait_for(lambda: not is_alive(server), "the server's end")
        wait_for_text(log, "saved")
        pid = int(log.read_text().split()[1])
        wait_for(lambda: not is_alive(pid), "the command's end")
    finally:
        os.kill(worker, signal.SIGKILL)
        owner.kill()
        owner.communicate()


def test_a_server_ends_with_another_owner():
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        server = ForkServer([sys.executable, "-c", SERVER], environment_here(), other.pid)
        try:
            assert wait_for(lambda: server.settled(0.1), "the server")
            assert is_alive(server.pid)
            other.kill()
            wait_for(lambda: not is_alive(server.pid), "the server's end")
        finally:
            server.close()


def test_a_server_that_still_imports_ends_with_its_owner(tmp_path):
    owner, server, worker = begin_owner(SLOW_IMPORT, "", tmp_path / "log")
    try:
        owner.kill()
        wait_for(lambda: not is_alive(server), "the server's end")
    finally:
        os.kill(worker, signal.SIGKILL)
        owner.kill()
        owner.communicate()


def test_a_sweep_prepares_a_new_process_when_the_code_has_changed(monkeypatch):
    """A run's record says which code it has run."""
    digests = ["one"]
    monkeypatch.setattr(prepared, "find_code_digest", lambda: digests[-1])
    monkeypatch.setattr(prepared, "COMMAND", (sys.executable, "-c", SERVER))
    owner = ProcessId.of_this_process()

    def found():
        return prepared.prepared_process(os.environ, (), owner)

    try:
        first = found()
        assert found() is first
        digests.append("another")
        second = found()
        assert second is not first
        assert first.settled(0.0)
        assert not is_alive(first.pid)
        assert wait_for(lambda: second.settled(0.1), "the server")
        assert is_alive(second.pid)
    finally:
        prepared.end_prepared_process()
