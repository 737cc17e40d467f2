"""One job of a sweep, in the process in which a launcher calls it.

The job's process validates the configuration, makes the run folder, starts the run in a child
process and waits for it. It communicates with the sweep through the sweep's folder only, so it may
run on any machine that sees that folder. Errors of a job are recorded and not raised, so that the
other jobs continue.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.commands.sweep.folder import JobFile, job_file, stop_all_mark, stop_mark
from openenv_pipe.commands.sweep.prepared import prepared_process
from openenv_pipe.config.compose import Composed, compose
from openenv_pipe.config.secrets import restore_in_config, unwritten_secrets
from openenv_pipe.errors import PipeError, UserError, last_lines
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.files import write_json
from openenv_pipe.system.foreign_text import for_people
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.process_id import ProcessId

POLL_S = 0.1
STOP_LIMIT_S = 120.0  # a run that is asked to stop finishes its update and saves
NUM_LINES = 12  # the last lines of the log, one of which is the error
ERROR = "error: "  # the beginning of that line


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One job to do. Launchers send it, within `Orders`, to other processes by pickle."""

    index: int
    overrides: tuple[str, ...]  # secrets are marks, because a launcher may write orders to disk
    folder: str | None  # the run to resume, relative to the sweep's folder; None: a new run


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """The jobs of one launch; calling it with a number does one of them."""

    sweep: Path
    attempt: int
    owner: ProcessId  # of the sweep
    servers: Path  # the unix socket of its shared servers, on the owner's machine
    jobs: tuple[Order, ...]

    def __call__(self, number: int) -> None:
        """Do a job, unless the sweep has been stopped. Errors of the job are not raised."""
        if os.getpid() != self.owner.pid and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep's process handles Ctrl-C
        job = self.jobs[number]
        if not self._stopped(job):
            self._do(job)

    def _do(self, job: Order) -> None:
        try:
            composed = compose(restore_in_config(list(job.overrides)))
            folder = self._find_folder(job, composed)
        except PipeError as error:
            self._write(job, error=for_people(str(error)))
            return
        known = {"run": folder.record.id, "folder": os.path.relpath(folder.path, self.sweep)}
        self._write(job, **known)
        secrets = unwritten_secrets(composed.config.model_dump(mode="json"))
        log = self.sweep / "jobs" / f"{job.index:04d}.log"
        exit_code = self._play(job, folder, secrets, log)
        if self._stopped(job):
            _close_stopped(folder.path)
        elif unrecorded := _unrecorded_error(folder.path, exit_code, log):
            self._write(job, **known, error=unrecorded)

    def _find_folder(self, job: Order, composed: Composed) -> RunFolder:
        """Return the folder of the run to resume, or of a new one. Raises RunFolderError."""
        if job.folder is not None:
            return RunFolder.open(self.sweep / job.folder)
        return RunFolder.create(
            composed.config,
            overrides=composed.overrides,
            command=["openenv-pipe", "train", *job.overrides],
            sweep=self.sweep.name,
        )

    def _play(
        self, job: Order, folder: RunFolder, secrets: Mapping[str, str], log: Path
    ) -> int | None:
        """Run the child process until it ends or the job is stopped; return its exit code.

        secrets: variables to add to the environment.
        """
        command = [sys.executable, "-m", "openenv_pipe.cli.main", "job", str(folder.path)]
        command.append("--trust")  # It is new, or the sweep has checked it before it went on.
        if job.folder is not None:
            command.append("--resume")
        if self.owner.host == socket.gethostname():
            command += ["--servers", str(self.servers)]
        environment = os.environ | secrets
        prepared = prepared_process(environment, other=secrets, sweep=self.owner)
        while prepared is not None and not prepared.settled(POLL_S):
            if self._stopped(job):
                return None
        process = ManagedProcess(
            command,
            log=log,
            environment=environment,
            grace_s=STOP_LIMIT_S,
            fork_server=prepared,
        )
        try:
            while process.wait(POLL_S) is None:
                if self._stopped(job):
                    break
        finally:
            process.stop(STOP_LIMIT_S)
        return process.returncode

    def _stopped(self, job: Order) -> bool:
        """Return whether the sweep was stopped, has pruned this job, or has died."""
        return (
            stop_all_mark(self.sweep, self.attempt).exists()
            or stop_mark(self.sweep, job.index).exists()
            or not self.owner.alive
        )

    def _write(self, job: Order, **known: str) -> None:
        described = JobFile(attempt=self.attempt, **known)
        write_json(job_file(self.sweep, job.index), described.model_dump())


def _close_stopped(path: Path) -> None:
    """Record the end of a run that was stopped before its own process could record it."""
    folder = RunFolder.open(path)
    if folder.record.status == "running":
        folder.finish("interrupted", cause="interrupted")


def _unrecorded_error(path: Path, exit_code: int | None, log: Path) -> str | None:
    """Return the error with which a run ended; None if the run has recorded it itself."""
    folder = RunFolder.open(path)
    if folder.record.status != "running" and exit_code != UserError.exit_code:
        return None
    errors = [line for line in last_lines(log, NUM_LINES).splitlines() if ERROR in line]
    error = errors[-1].partition(ERROR)[2] if errors else f"it ended with exit code {exit_code}"
    error = for_people(f"{error} (log: {log})")
    if folder.record.status == "running":
        folder.finish("failed", cause=error)
    return error
