"""Runs the commands as processes, as a user does, without importing torch for each of them.

One process imports torch and the package, and forks once for each command. Each fork has a working
folder and an environment of its own, and can be signalled and waited for like any other process.
Tests that depend on a fresh interpreter cannot use this: all forks share one seed of string hashes.
"""

import atexit
import functools
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

REPOSITORY = Path(__file__).parents[1]
LIMIT_S = 240.0
SMALL = ("num_threads=1", "host.sessions_per_server=8", "device=cpu")
ENVIRONMENT = {
    "PYTHONPATH": str(REPOSITORY),
    "PYTHONWARNINGS": "default",
    "OMP_WAIT_POLICY": "PASSIVE",  # torch reads this when it is imported
}
LONGEST_REQUEST = 2**20
# Commands import these when they need them, which takes several times as long as a short run.
SLOW_IMPORTS = (
    "openenv_pipe.pipeline",
    "peft",
    "matplotlib.figure",
    "aiohttp",
    "hydra",
    "tabulate",
)
Found = TypeVar("Found")
# bytes of a number in the status pipe, so that two unread numbers can be told apart
NUMBER_WIDTH = 8


class Command:
    """An `openenv-pipe` process in a folder, with the part of Popen's interface that tests use."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.returncode: int | None = None
        self._outputs = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self._status, theirs = os.pipe()
        weakref.finalize(self, _close, [*self._outputs, self._status])
        request = json.dumps([str(folder), arguments, {**os.environ, **ENVIRONMENT}]).encode()
        assert len(request) < LONGEST_REQUEST
        socket.send_fds(_importer(), [request], [*self._outputs, theirs])
        os.close(theirs)
        self.pid = self._next_number(LIMIT_S)

    def poll(self) -> int | None:
        if self.returncode is None and self._has_told(0.0):
            self.returncode = self._next_number(0.0)
        return self.returncode

    def wait(self, timeout: float = LIMIT_S) -> int:
        if self.returncode is None:
            self.returncode = self._next_number(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process for the length of the block, so that it does not end meanwhile."""
        self.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = LIMIT_S) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr."""
        self.wait(timeout)
        return self.out, self.err

    @property
    def out(self) -> str:
        """Return what the command has printed to stdout so far."""
        return _text(self._outputs[0])

    @property
    def err(self) -> str:
        return _text(self._outputs[1])

    def _has_told(self, timeout_s: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._status, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def _next_number(self, timeout_s: float) -> int:
        """Read a number from the status pipe: the process id comes first, then the exit code."""
        if not self._has_told(timeout_s):
            raise subprocess.TimeoutExpired("openenv-pipe", timeout_s)
        return int(os.read(self._status, NUMBER_WIDTH))


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a command; return exit code, stdout and stderr, and assert that it left no server."""
    command = Command(folder, *arguments)
    try:
        out, err = command.communicate()
    finally:
        command.kill()
    assert servers_of(folder) == []
    return command.wait(), out, err


def servers_of(folder: Path) -> list[psutil.Process]:
    """Return the environment servers whose output goes to a log below `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            paths = [
                process.cwd(),
                *(str(Path(f"/proc/{process.pid}/fd/{fd}").readlink()) for fd in (1, 2)),
            ]
        except (psutil.Error, OSError):
            continue
        if any(path.startswith(str(folder)) for path in paths) and process.pid != os.getpid():
            found.append(process)
    return found


def wait_until(
    condition: Callable[[], Found],
    what: str,
    command: Command | None = None,
    limit_s: float = LIMIT_S,
) -> Found:
    """Poll the condition and return its first true value. Fails if the command ends before that."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        assert command is None or command.poll() is None, f"ended before {what}: {command.err}"
        time.sleep(0.02)
    return found


def ended_by(number: int, command: Command, when: Callable[[], object], what: str) -> int:
    """Send the signal once the condition is true, and return the command's exit code."""
    try:
        wait_until(when, what, command)
        command.send_signal(number)
        return command.wait()
    finally:
        command.kill()


@functools.cache
def _importer() -> socket.socket:
    """Start the process that forks for commands, which ends with this one; return its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.commands", str(theirs.fileno())],
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT},
            pass_fds=[theirs.fileno()],
        )
    atexit.register(process.wait)
    # atexit runs these in reverse order: the socket closes before the wait
    atexit.register(ours.close)
    return ours


def _text(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _serve(channel: socket.socket) -> None:
    """Fork once for each request. Returns in each fork, and when the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal; the forks restore its handler
    # nobody waits for the forks, so the kernel reaps them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, LONGEST_REQUEST, 3)
        if not request:
            return
        if os.fork() == 0:
            break
        _close(descriptors)
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    *outputs, status = descriptors
    pid = os.fork()
    if pid == 0:
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        _close(descriptors)
        _become(*json.loads(request))
    else:
        os.write(status, f"{pid:{NUMBER_WIDTH}}".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, f"{code:{NUMBER_WIDTH}}".encode())
        os._exit(0)


def _become(folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # tempfile looks at TMPDIR again
    warnings.resetwarnings()
    warnings.simplefilter("default")
    sys.argv = ["openenv-pipe", *arguments]
    sys.path[0] = folder
    cli.main(arguments)


if __name__ == "__main__":
    from openenv_pipe.cli import main as cli

    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        _serve(channel)
