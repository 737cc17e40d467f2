"""The worker of a sweep: a process that runs one job after another (`worker_process`).

It keeps the imported libraries, and the servers that several jobs need. If it dies, or a job fails
in it, the next job gets a new one. So does the next job after a change of the code on disk, because
a run's record names the code that it has run.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

from openenv_pipe.runs.provenance import find_code_digest, find_versions
from openenv_pipe.system.guard import Redactor
from openenv_pipe.system.process import ManagedProcess, log_redactor

MODULE = "openenv_pipe.extras.sweeps.worker_process"
STOP = "stop"  # asks for the end of the job in progress
INTERRUPTED = 130  # the exit code of a job that was asked to stop
POLL_S = 0.1
STOP_LIMIT_S = 120.0  # a run that is asked to stop finishes its update and saves
END_LIMIT_S = 60.0  # for the end of the servers that an idle worker keeps
DRAIN_LIMIT_S = 1.0  # for the end of the output, which a process of user code may keep open


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJob:
    """A job as the worker gets it, followed by the file descriptor for its output."""

    run: str  # the run's folder
    resumes: bool
    secrets: Mapping[str, str]  # environment variables that the job adds


class Worker:
    def __init__(self, servers: Path | None) -> None:
        """servers: the folder for logs of servers that jobs share; None: each job has its own."""
        self.num_starts: Counter[str] = Counter()  # of shared servers, by kind
        self.num_leases: Counter[str] = Counter()  # of shared servers, by kind
        self._servers = servers
        self._process: ManagedProcess | None = None
        self._connection: Connection
        self._code: tuple[str, dict[str, str]]  # digest of this tool's files, versions of packages
        self._is_ready = False  # its imports are done
        self._is_idle = True

    def run(self, job: WorkerJob, log: Path, is_stopped: Callable[[], bool]) -> int | None:
        """Run a job to its end and return the exit code; None if it had to be killed.

        If the worker dies, the exit code is that of its process.

        log: gets the output, without secrets.
        is_stopped: called regularly; True asks the job to save and end.
        """
        code = find_code_digest(), find_versions()
        if self._process is not None and (code != self._code or not self._process.alive):
            self.close()
        if self._process is None:
            self._start(log)
            self._code = code
        self._is_idle = False
        reader, writer = os.pipe()
        copying = threading.Thread(
            target=_copy_output, args=(reader, log, log_redactor()), daemon=True
        )
        copying.start()
        exit_code = None
        try:
            with os.fdopen(writer, "wb"), suppress(ConnectionError):  # `_wait` finds a dead worker
                self._connection.send(job)
                send_handle(self._connection, writer, None)
            exit_code = self._wait(is_stopped)
        finally:
            if exit_code not in (0, INTERRUPTED):
                self.close()
            copying.join(DRAIN_LIMIT_S)
        return exit_code

    def close(self) -> None:
        """End the process and the servers that it keeps; a job in progress is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        self._connection.close()  # An idle worker then ends its servers and itself.
        if self._is_idle:
            process.wait(END_LIMIT_S)
        process.stop(0.0)

    def _start(self, log: Path) -> None:
        """Start the process. log: for what it prints outside of its jobs, such as during imports.

        Raises OSError: it cannot be started.
        """
        self._connection, theirs = Pipe()
        with theirs:
            self._process = ManagedProcess(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), str(self._servers or "")],
                log=log,
                environment=os.environ,
                grace_s=STOP_LIMIT_S,
                pass_fds=(theirs.fileno(),),
            )
        self._is_ready = False

    def _wait(self, is_stopped: Callable[[], bool]) -> int | None:
        """Wait for the end of the job; once `is_stopped` returns True, ask the job to end."""
        assert self._process is not None
        kill_at_s: float | None = None
        while True:
            try:
                message = self._connection.recv() if self._connection.poll(POLL_S) else ()
            except (EOFError, ConnectionError):
                return self._process.wait(END_LIMIT_S)
            match message:
                case ("ready",):
                    self._is_ready = True
                case ("lease", kind, is_new):
                    self.num_leases[kind] += 1
                    self.num_starts[kind] += is_new
                case ("end", exit_code):
                    self._is_idle = True
                    return int(exit_code)
            if kill_at_s is None and is_stopped():
                if not self._is_ready:
                    return None
                kill_at_s = time.monotonic() + STOP_LIMIT_S
                with suppress(ConnectionError):
                    self._connection.send(STOP)
            elif not self._process.alive or (kill_at_s and time.monotonic() > kill_at_s):
                return self._process.returncode


def _copy_output(reader: int, log: Path, redactor: Redactor) -> None:
    """Append a job's output to its log. What a full disk does not take is lost."""
    with os.fdopen(reader, "rb", buffering=0) as source, log.open("ab", buffering=0) as target:
        while chunk := source.read(2**16):
            with suppress(OSError):
                target.write(redactor.feed(chunk))
        with suppress(OSError):
            target.write(redactor.end())
