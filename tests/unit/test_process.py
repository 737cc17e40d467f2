"""`ManagedProcess`: return codes, logs and bounded stops. test_process_tree tests lifetimes."""

import asyncio
import os
import signal
import socket
import sys
import time

import pytest

from openenv_pipe.system.guard import Redactor
from openenv_pipe.system.process import ManagedProcess, free_port, port_in_use

LIMIT_S = 60.0  # waits for what takes a moment on an idle machine
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"


@pytest.fixture
def start(tmp_path):
    """Start Python code as a process; the fixture stops all of them at the end."""
    started = []

    def start_code(code, *arguments, **options):
        options = {"environment": os.environ, "log": tmp_path / "logs" / "log"} | options
        process = ManagedProcess([sys.executable, "-c", code, *arguments], **options)
        started.append(process)
        return process

    yield start_code
    for process in started:
        process.stop(0)


def wait_for_text(log, text):
    deadline = time.monotonic() + LIMIT_S
    while text not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, f"{text!r} never appeared in {log}"
        time.sleep(0.01)


def test_output_goes_to_the_log_and_is_appended(start, tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    process = start("import sys; print('out'); print('err', file=sys.stderr)", log=log)
    assert process.wait(LIMIT_S) == 0
    lines = log.read_text().splitlines()
    assert lines[0] == "before"
    assert sorted(lines[1:]) == ["err", "out"]


def test_no_secret_reaches_the_log_in_whatever_pieces_it_is_written(start, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789")
    code = (
        "import os, time\n"
        "for byte in b'key tok-0123456789 to':\n"
        "    os.write(1 + byte % 2, bytes([byte]))\n"
        "    time.sleep(0.001)\n"
        "os.write(2, b'tok-01234567890' * 100_000)\n"
    )
    process = start(code, log=tmp_path / "log")
    assert process.wait(LIMIT_S) == 0
    assert (tmp_path / "log").read_text() == (
        "key <hidden: MY_TOKEN> to" + "<hidden: MY_TOKEN>0" * 100_000
    )


@pytest.mark.parametrize("size", range(1, 9))
def test_texts_are_replaced_across_chunks(size):
    data = b"abcabcdabcx abcabcab"
    redactor = Redactor({b"abcabcd": b"1", b"bcx": b"2"})
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert b"".join([*map(redactor.feed, chunks), redactor.end()]) == b"1a2 abcabcab"


def test_environment_and_folder_are_those_given(start, tmp_path):
    code = "import os; print(os.getcwd(), os.environ['A'], 'HOME' in os.environ)"
    process = start(code, environment={"A": "1"}, cwd=tmp_path, log=tmp_path / "log")
    assert process.wait(LIMIT_S) == 0
    assert (tmp_path / "log").read_text().split() == [str(tmp_path), "1", "False"]


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ],
)
def test_return_code_is_the_commands(start, code, returncode):
    process = start(code)
    assert process.wait(LIMIT_S) == returncode
    assert process.returncode == returncode
    assert not process.alive


def test_a_command_that_does_not_exist_says_so_in_the_log(tmp_path):
    log = tmp_path / "log"
    process = ManagedProcess(["no-such-command"], log=log, environment=os.environ)
    assert process.wait(LIMIT_S) == 127
    assert process.stop(0) == 127
    assert "no-such-command" in log.read_text()


def test_scratch_goes_with_the_command(start, tmp_path):
    scratch = tmp_path / "scratch"
    (scratch / "inner").mkdir(parents=True)
    process = start("import sys; sys.exit(4)", scratch=scratch)
    assert process.wait(LIMIT_S) == 4
    assert not scratch.exists()


def test_wait_is_bounded(start):
    process = start("import time; time.sleep(600)")
    assert process.wait(0.05) is None
    assert process.alive


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells of ends")
@pytest.mark.parametrize("code", ["import sys; sys.stdin.read(1); sys.exit(3)", "exit(3)"])
async def test_the_end_is_noticed_without_polling(start, monkeypatch, code):
    monkeypatch.setattr("openenv_pipe.system.process.EXIT_POLL_S", 3600.0)
    assert await asyncio.wait_for(start(code).exited(), LIMIT_S) == "exit code 3"


def test_stop_lets_the_command_clean_up(start, tmp_path):
    code = """
import signal, sys, time
def clean_up(*_):
    print("clean", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, clean_up)
print("up", flush=True)
time.sleep(600)
"""
    process = start(code, log=tmp_path / "log")
    wait_for_text(tmp_path / "log", "up")
    assert process.stop(LIMIT_S) == 5
    assert "clean" in (tmp_path / "log").read_text()


def test_stop_kills_what_ignores_sigterm_and_may_be_called_again(start, tmp_path):
    process = start(DEAF + "; time.sleep(600)", log=tmp_path / "log")
    wait_for_text(tmp_path / "log", "up")
    assert process.stop(0.2) == 128 + signal.SIGKILL
    assert process.stop(0.2) == 128 + signal.SIGKILL


def test_a_stopped_command_does_not_hold_up_the_stop(start, tmp_path):
    process = start(
        "import os; print('up', flush=True); os.kill(os.getpid(), 19)", log=tmp_path / "log"
    )
    wait_for_text(tmp_path / "log", "up")
    assert process.stop(0.2) is not None


def test_ctrl_c_is_left_to_the_parent(start, tmp_path):
    process = start("import time; print('up', flush=True); time.sleep(600)", log=tmp_path / "log")
    wait_for_text(tmp_path / "log", "up")
    os.kill(process.pid, signal.SIGINT)
    assert os.getsid(process.pid) != os.getsid(0)
    assert process.wait(0.2) is None


def test_a_command_without_a_session_of_its_own_is_not_of_our_group(start, tmp_path):
    """The terminal's Ctrl-C reaches our group only."""
    code = "import os; print(os.getsid(0), os.getpgid(os.getppid()), os.getpgid(0))"
    process = start(code, own_session=False)
    assert process.wait(LIMIT_S) == 0
    session, *groups = map(int, (tmp_path / "logs" / "log").read_text().split())
    assert session == os.getsid(0)
    assert os.getpgid(0) not in groups


def test_the_command_starts_with_default_signals(start):
    code = (
        "import signal as s; "
        "assert s.getsignal(s.SIGINT) is s.default_int_handler; "
        "assert s.getsignal(s.SIGHUP) is s.SIG_DFL; "
        "assert not s.pthread_sigmask(s.SIG_BLOCK, ())"
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        process = start(code)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert process.wait(LIMIT_S) == 0


def test_ports():
    port = free_port()
    assert not port_in_use(port)
    with socket.create_server(("127.0.0.1", port)):
        assert port_in_use(port)
    assert not port_in_use(port)
