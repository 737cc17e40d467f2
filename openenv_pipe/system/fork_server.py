"""Fork commands from a process that has already imported what they need.

A `ForkServer` starts that process, which calls `serve`. For each request it forks a guardian
(`guard.py`), and the guardian forks the command, so that a command ends as one that was executed
does: with its owner, with its guardian, or when it is stopped. A request is a message with these
file descriptors; what is secret in an environment is in memory only:

    request     a file in memory: the command, its environment, and seconds of grace
    stdin, log  of the guardian
    status      a pipe, to which the guardian writes its process id, and later the exit code
    owner       tells when the process that asked is gone

Only where Linux is, because forks of threads and libraries are safe there, and ends can be watched.
"""

import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from openenv_pipe.system.guard import guard

READY = b"r"
REQUEST = b"f"
NUM_DESCRIPTORS = 5
NUMBER = struct.Struct("!i")
OWNER_CHECK_S = 1.0
START_LIMIT_S = 30.0  # for a fork, which takes milliseconds
KILL_LIMIT_S = 5.0
FAILED = 128 + signal.SIGKILL  # the return code of a guardian that could not report one


def can_fork() -> bool:
    """True if this system has what a `ForkServer` needs."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class ForkedGuard:
    """The guardian of a forked command, with the part of Popen's interface that is needed."""

    def __init__(self, pid: int, status: int, stdin: int) -> None:
        """status, stdin: our ends of these two pipes, which belong to this object."""
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self._status = status
        self._returncode: int | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, status)

    def poll(self) -> int | None:
        """Return the return code; None while the guardian is alive."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float) -> int:
        """Return the return code. Raises subprocess.TimeoutExpired."""
        if self._returncode is None and not is_readable(self._status, timeout):
            raise subprocess.TimeoutExpired("a forked command", timeout)
        with self._lock:  # Several threads may wait, and one of them reads.
            if self._returncode is None:
                number = _read_number(self._status)
                self._returncode = FAILED if number is None else number
            return self._returncode

    def kill(self) -> None:
        """Send SIGKILL to the guardian, with which the command ends."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A process of this one from which commands are forked. It ends with this process."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], owner: int | None = None
    ) -> None:
        """Start `command` with more arguments, for `serve`.

        owner: the id of another process with which it ends, too.

        Raises:
            OSError: It cannot be started, or the owner is gone.
        """
        self._environment = dict(environment)
        self._folder = os.getcwd()  # noqa: PTH109 - compared with the same call
        self._has_failed = False
        self._is_ready = False
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, ExitStack() as opened:
            passed = [theirs.fileno()]
            for pid in {os.getpid(), owner or os.getpid()}:
                passed.append(os.pidfd_open(pid))
                opened.callback(os.close, passed[-1])
            self._process = subprocess.Popen(
                [*command, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # What it prints would not be redacted.
                stderr=subprocess.DEVNULL,
                env=self._environment,
                pass_fds=passed,
                start_new_session=True,  # The terminal's Ctrl-C does not reach it.
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fits(self, environment: Mapping[str, str], other: Collection[str] = ()) -> bool:
        """True if a command of this environment, in the current folder, may be forked.

        Imports may read any variable, so all have to be those of the server, except `other`.
        """
        names = self._environment.keys() | environment.keys()
        same_folder = os.getcwd() == self._folder  # noqa: PTH109
        return same_folder and all(
            self._environment.get(name) == environment.get(name) for name in names - set(other)
        )

    def settled(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; True once it is ready, or has failed."""
        with self._lock:
            if not (self._is_ready or self._has_failed) and is_readable(self._channel, timeout_s):
                self._is_ready = self._receive() == READY
                self._has_failed = not self._is_ready
            return self._is_ready or self._has_failed

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: int, grace_s: float
    ) -> ForkedGuard | None:
        """Fork a process that does what `command` does; None if the server cannot do it.

        log: the descriptor of a file for the output; the other arguments as in `ManagedProcess`.
        """
        if not self._is_ready or self._has_failed:
            return None
        described = {"command": list(command), "environment": dict(environment), "grace_s": grace_s}
        request = json.dumps(described).encode()
        with self._lock, ExitStack() as theirs:
            try:
                return self._request(request, log, theirs)
            except OSError:  # It is gone, or this process has too many open files.
                return None

    def close(self) -> None:
        """End the server. Commands that it has forked go on. May be called again."""
        self._has_failed = True
        self._kill()  # It has nothing to save, and would not notice the end while it imports.
        with self._lock:  # Another thread may wait for an answer, which ends with the process.
            self._channel.close()

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(len(READY))
        except OSError:
            return b""

    def _kill(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # It hangs in the kernel, and ends after that.
            self._process.wait(KILL_LIMIT_S)

    def _request(self, request: bytes, log: int, theirs: ExitStack) -> ForkedGuard | None:
        """Send a request. Raises OSError. theirs: closes the server's descriptors."""

        def given(descriptor: int) -> int:
            theirs.callback(os.close, descriptor)
            return descriptor

        body = given(os.memfd_create("request"))
        os.write(body, request)
        owner = given(os.pidfd_open(os.getpid()))
        with ExitStack() as ours:
            stdin, our_stdin = os.pipe()
            ours.callback(os.close, our_stdin)
            status, their_status = os.pipe()
            ours.callback(os.close, status)
            sent = [body, given(stdin), log, given(their_status), owner]
            socket.send_fds(self._channel, [REQUEST], sent)
            theirs.close()
            if not is_readable(status, START_LIMIT_S):
                self._has_failed = True
                self._kill()  # Now the pipe has its end, or the process id comes after all.
            pid = _read_number(status) if is_readable(status, KILL_LIMIT_S) else None
            if pid is None:
                return None
            ours.pop_all()
            return ForkedGuard(pid, status, our_stdin)


def is_readable(source: "int | socket.socket", timeout_s: float) -> bool:
    """Wait at most `timeout_s` for something to read, or its end."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _read_number(status: int) -> int | None:
    """Read a number that a guardian has written; None if it has ended."""
    data = os.read(status, NUMBER.size)
    return NUMBER.unpack(data)[0] if len(data) == NUMBER.size else None


class _InCommandError(Exception):
    """Leaves the guardian's code in the process of its command."""


@dataclass(frozen=True, slots=True)
class _Descriptors:
    """Those that come with a request, in the order in which they are sent."""

    body: int
    stdin: int
    log: int
    status: int
    owner: int


def serve(arguments: Sequence[str], prepare: Callable[[], None]) -> list[str]:
    """Call `prepare`, and fork for each request. Returns the command, in its own process only.

    arguments: those that `ForkServer` has added, the descriptors of its channel and of owners.

    The server's process ends when the channel is closed or an owner is gone.
    """
    descriptor, *owners = map(int, arguments)
    channel = socket.socket(fileno=descriptor)

    def check_owners(*_: object) -> None:
        if any(is_readable(each, 0.0) for each in owners):
            os._exit(0)

    signal.signal(signal.SIGALRM, check_owners)
    signal.setitimer(signal.ITIMER_REAL, OWNER_CHECK_S, OWNER_CHECK_S)  # also during the imports
    prepare()
    gc.freeze()  # so that a collection in a fork does not copy all pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the guardians.
    kept = _open_descriptors() - {descriptor, *owners}
    with suppress(OSError):
        channel.send(READY)
    while True:
        _, received, _, _ = socket.recv_fds(channel, len(REQUEST), NUM_DESCRIPTORS)
        if len(received) != NUM_DESCRIPTORS:
            os._exit(0)
        try:
            pid = os.fork()
        except OSError:  # no memory; the owner sees the end of the status pipe
            pid = -1
        if pid == 0:
            channel.close()
            request = _guarded(_Descriptors(*received))
            _become_command(kept, request["environment"])
            return request["command"]
        for descriptor in received:
            os.close(descriptor)


def _guarded(given: _Descriptors) -> dict[str, Any]:
    """Guard one command in this process. Returns the request, in the command's process only."""
    try:
        os.setsid()
        request = json.loads(os.pread(given.body, os.fstat(given.body).st_size, 0))
        for number, descriptor in enumerate((given.stdin, given.log, given.log)):
            os.dup2(descriptor, number)
        os.write(given.status, NUMBER.pack(os.getpid()))
        code = guard(_leave, lambda: not is_readable(given.owner, 0.0), request["grace_s"])
        with suppress(OSError):  # The owner is gone.
            os.write(given.status, NUMBER.pack(code))
    except _InCommandError:
        return request
    except BaseException:
        os._exit(FAILED)
    os._exit(0)


def _leave() -> NoReturn:
    raise _InCommandError


def _become_command(kept: Collection[int], environment: Mapping[str, str]) -> None:
    """Leave what a new Python process would have: signals, descriptors, variables, random state."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in _open_descriptors() - set(kept):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if "numpy" in sys.modules:  # Python seeds `random` itself.
        sys.modules["numpy"].random.seed()


def _open_descriptors() -> set[int]:
    folder = "/proc/self/fd"
    found = os.listdir(folder)  # noqa: PTH208 - one of them was open for the list only
    return {int(name) for name in found if os.path.exists(f"{folder}/{name}")}  # noqa: PTH110
