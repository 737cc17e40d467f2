"""Start and end processes with a log file, and find free ports.

A command runs under a guardian (`guard.py`) that ends its whole process tree when this process
stops it, exits or is killed, SIGKILL included. There are no shells, no captured output and no
restarts; the output is in the log, without secrets.
"""

import asyncio
import errno
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from openenv_pipe.system.guard import Redactor
from openenv_pipe.system.secrets import secret_forms

GUARD = Path(__file__).with_name("guard.py")
KILL_MARGIN_S = 6.0  # the guardian's KILL_LIMIT_S and one second
EXIT_POLL_S = 0.05
STOP_POLL_S = 0.01


class ManagedProcess:
    """One running command. Its stdout and stderr are appended to `log`.

    `wait` and `stop` block; on an event loop use `exited` and `stopped`. Calls from several
    threads are safe.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        cwd: Path | None = None,
        grace_s: float = 5.0,
        scratch: Path | None = None,
        pass_fds: Sequence[int] = (),
        own_session: bool = True,
    ) -> None:
        """Start `command`, found on PATH if it has no slash.

        environment: the complete environment; no variable of this process is added.
        grace_s: seconds between SIGTERM and SIGKILL if this process dies.
        scratch: a folder to remove when the command ends.
        pass_fds: file descriptors that the command inherits under the same numbers.
        own_session: whether it gets a session, without a terminal. Linux divides the processor
            between sessions first, so a polling command in its own may leave ours next to nothing.
        A command that cannot be started ends with return code 127 and the reason in the log.

        Raises OSError: The log or `cwd` is unusable.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        guardian = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(grace_s)]
        guarded = [*guardian, str(scratch or ""), *command]
        self.log = log
        with log.open("ab") as output:
            # The terminal's Ctrl-C reaches neither a session nor a group of the command's own.
            self._guard = subprocess.Popen(
                guarded,
                bufsize=0,
                stdin=subprocess.PIPE,  # Its end of file tells the guardian that we died.
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                pass_fds=pass_fds,
                start_new_session=own_session,
                process_group=None if own_session else 0,
            )
        assert self._guard.stdin is not None
        self._stdin = self._guard.stdin
        with suppress(BrokenPipeError):  # It has been killed already.
            self._stdin.write(_replacements())

    @property
    def pid(self) -> int:
        """The guardian's process id; the command is its child."""
        return self._guard.pid

    @property
    def returncode(self) -> int | None:
        """None while alive; then the command's code, or 128 + N if signal N ended it."""
        return self._guard.poll()

    @property
    def alive(self) -> bool:
        return self.returncode is None

    def wait(self, timeout_s: float) -> int | None:
        """Block until the end, at most `timeout_s`; return the code, or None if still alive."""
        try:
            return self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def begin_stop(self, timeout_s: float) -> None:
        """Request the end and return at once: SIGTERM to the tree, SIGKILL after `timeout_s`."""
        with suppress(BrokenPipeError, ValueError):  # It has ended, or was stopped already.
            self._stdin.write(f"{timeout_s}\n".encode())

    def stop(self, timeout_s: float) -> int | None:
        """End the whole tree and return the return code. May be called again.

        Takes at most `timeout_s`, plus `KILL_MARGIN_S` if SIGTERM was not enough. Returns None if
        the kernel did not end it in that time.
        """
        self.begin_stop(timeout_s)
        if self.wait(timeout_s + KILL_MARGIN_S) is None:
            self._guard.kill()
            self.wait(1.0)
        self._stdin.close()
        return self.returncode

    async def exited(self) -> str:
        """Return when the command has ended, with the cause: 'exit code 1'."""
        await self._notified()
        while self.alive:
            await asyncio.sleep(EXIT_POLL_S)
        return f"exit code {self.returncode}"

    async def _notified(self) -> None:
        """Return when the kernel reports the end; at once where it cannot report it."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # Only Linux has it; or the process is gone already.
            return
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(descriptor, has_ended.set)
        try:
            if self.alive:  # Otherwise the number may belong to another process by now.
                await has_ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    async def stopped(self, timeout_s: float) -> None:
        """Do what `stop` does without blocking the event loop."""
        self.begin_stop(timeout_s)
        deadline = time.monotonic() + timeout_s + KILL_MARGIN_S
        while self.alive and time.monotonic() < deadline:
            await asyncio.sleep(STOP_POLL_S)
        await asyncio.to_thread(self.stop, 0.0)


def log_redactor() -> Redactor:
    """Return what removes secrets from a log that this process copies."""
    forms = secret_forms().items()
    return Redactor({text.encode(errors="replace"): mark.encode() for text, mark in forms})


def _replacements() -> bytes:
    """Return the guardian's first line: the secrets to hide in the log, and their marks."""
    forms = secret_forms().items()
    pairs = (f"{text.encode(errors='replace').hex()}={mark.encode().hex()}" for text, mark in forms)
    return " ".join(pairs).encode() + b"\n"


def free_port(host: str = "127.0.0.1") -> int:
    """Find a TCP port that is free now; callers retry if another program takes it meanwhile."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """True if binding `port` would fail now because another server has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False


def usable_cores() -> list[int]:
    """Return the numbers of the CPU cores that this process may use; a container can limit them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@cache
def cpu_model() -> str:
    """Return the name of this machine's processor, such as "AMD EPYC 9B14"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
