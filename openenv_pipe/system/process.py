"""The only place that starts processes: log file, end of the whole tree, free ports.

A command runs under a guardian (`guard.py`) that ends it, and everything it started, when this
process stops it, exits or is killed, SIGKILL included. Refused here: shells, captured output,
restarts. Who needs the output reads the log.
"""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
KILL_MARGIN_S = 6.0  # what the guardian may need beyond the grace: its own limit, and a second


class ManagedProcess:
    """One running command. Its stdout and stderr are appended to `log`.

    No method blocks the event loop except `wait` and `stop`, which belong into
    `asyncio.to_thread`. Calls from several threads are safe.
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
    ) -> None:
        """Start `command`, found on PATH if it has no slash.

        environment: the complete environment; nothing of ours is added.
        grace_s: seconds between SIGTERM and SIGKILL, should this process die.
        scratch: a folder that is removed with the command, however it ends.
        A command that cannot be started ends with return code 127 and the reason in the log.
        Raises OSError if the log or `cwd` is unusable.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        guardian = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(grace_s)]
        guarded = [*guardian, str(scratch or ""), *command]
        self.log = log
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                guarded,
                bufsize=0,
                stdin=subprocess.PIPE,  # its end is how the guardian learns of our death
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
            )

    @property
    def pid(self) -> int:
        """The guardian's process id: the command is its child."""
        return self._guard.pid

    @property
    def returncode(self) -> int | None:
        """None while alive; then the command's code, 128 + N if signal N ended it."""
        return self._guard.poll()

    @property
    def alive(self) -> bool:
        return self.returncode is None

    def wait(self, timeout_s: float) -> int | None:
        """Block until the end, at most `timeout_s`; the return code, None if still alive."""
        try:
            return self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def begin_stop(self, timeout_s: float) -> None:
        """Ask for the end and return at once: SIGTERM to the tree, SIGKILL after `timeout_s`."""
        with suppress(BrokenPipeError, ValueError):  # ended already; stopped already
            self._guard.stdin.write(f"{timeout_s}\n".encode())

    def stop(self, timeout_s: float) -> int | None:
        """End the whole tree and return the return code. May be called again.

        Takes at most `timeout_s` plus, if SIGTERM was not enough, `KILL_MARGIN_S`. None if the
        kernel did not let it end in that time.
        """
        self.begin_stop(timeout_s)
        if self.wait(timeout_s + KILL_MARGIN_S) is None:
            self._guard.kill()
            self.wait(1.0)
        self._guard.stdin.close()
        return self.returncode


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now. Another program may take it before it is used: see the retry
    in `hosts.process`."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """True if a server that binds `port` now would be refused because of another."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False
