"""One job of a sweep, in the sweep's process or in one on a node of a Ray cluster.

That process validates the configuration, makes the run folder, has a worker run it, and waits for
the end. It communicates with the sweep through the sweep's folder only, so it may be on any machine
that sees that folder. Errors of a job are recorded and not raised, so that the other jobs continue.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from openenv_pipe.config.compose import Composed, compose
from openenv_pipe.config.secrets import restore_in_config, unwritten_secrets
from openenv_pipe.errors import PipeError, UserError, last_lines
from openenv_pipe.extras.sweeps.folder import JobFile, job_file, stop_all_mark, stop_mark
from openenv_pipe.extras.sweeps.worker import Worker, WorkerJob
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.files import write_json
from openenv_pipe.system.process_id import ProcessId
from openenv_pipe.system.untrusted_text import for_people

NUM_LINES = 12  # the last lines of the log, one of which is the error
ERROR = "error: "  # the beginning of that line


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    index: int
    overrides: tuple[str, ...]  # secrets are marks, because Ray sends orders to other machines
    folder: str | None  # the run to resume, relative to the sweep's folder; None: a new run


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """The jobs of one launch. They are pickled for jobs on other machines."""

    sweep: Path
    attempt: int
    owner: ProcessId  # of the sweep
    jobs: tuple[Order, ...]

    def __call__(self, number: int) -> None:
        worker = Worker(servers=None)
        try:
            self.do(self.jobs[number], worker)
        finally:
            worker.close()

    def do(self, job: Order, worker: Worker) -> None:
        """Do a job, unless the sweep has been stopped. Errors of the job are not raised."""
        if self._stopped(job):
            return
        try:
            composed = compose(restore_in_config(list(job.overrides)))
            folder = self._find_folder(job, composed)
        except PipeError as error:
            self._write(job, error=for_people(str(error)))
            return
        known = {"run": folder.record.id, "folder": os.path.relpath(folder.path, self.sweep)}
        self._write(job, **known)
        asked = WorkerJob(
            run=str(folder.path),
            resumes=job.folder is not None,
            secrets=unwritten_secrets(composed.config.model_dump(mode="json")),
        )
        log = self.sweep / "jobs" / f"{job.index:04d}.log"
        exit_code = worker.run(asked, log, partial(self._stopped, job))
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
