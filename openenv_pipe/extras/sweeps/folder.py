"""The sweep's folder: its jobs, and how each of them ended.

    runs/sweeps/2026-11-20_14-30-05/
      sweep.json              the command, and for each job: overrides, run, status, cause
      jobs/0003.json          written by the job's process: which run it is
      jobs/0003.log           the output of that run
      jobs/0003.stop          asks that job to stop
      stop_1                  asks all jobs of the sweep's first attempt to stop
      servers/attempt_1/      logs of the servers that jobs shared

Only the sweep's own process writes sweep.json, and only a job's own process its file, so jobs may
run wherever this folder is visible. The results of a run are in the run's own folder.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import FailFast, ValidationError

from openenv_pipe.config.error_messages import first_problem
from openenv_pipe.config.secrets import hide_assignments, known_secrets
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.provenance import Record, Texts
from openenv_pipe.runs.trust import as_ascii, try_to_sign, why_untrusted
from openenv_pipe.system.files import read_json, write_json
from openenv_pipe.system.process_id import ProcessId

SWEEPS = "sweeps"
JobStatus = Literal["waiting", "running", "finished", "failed", "interrupted", "died", "pruned"]
OVER: frozenset[JobStatus] = frozenset({"finished", "failed", "pruned"})  # not to be run again


class JobFile(Record):
    """jobs/NNNN.json: the run of a job, or the reason why there is none."""

    attempt: int  # the sweep's
    run: str | None = None  # its id
    folder: str | None = None  # the run's, relative to the sweep's
    error: str | None = None  # why there is no run, or what the run's record does not say


class Job(Record):
    """One job in sweep.json."""

    index: int
    overrides: Texts
    status: JobStatus = "waiting"
    cause: str | None = None
    run: str | None = None  # "wordle/0007"
    folder: str | None = None  # the run's, relative to the sweep's
    trial: int | None = None  # in a search
    value: float | None = None  # by which a search judged it


class SweepRecord(Record):
    stamp: str
    status: Literal["running", "finished", "failed", "interrupted"]
    attempt: int  # 1, and one more for each resume
    command: Texts
    overrides: Texts
    signature: str | None = None  # of the overrides, and of the current folder of the first attempt
    created: datetime
    ended: datetime | None
    process: ProcessId
    jobs: Annotated[list[Job], FailFast()]


class SweepFolder:
    def __init__(self, path: Path, record: SweepRecord) -> None:
        self.path = path.absolute()
        self.record = record

    @classmethod
    def create(
        cls, runs_dir: Path, overrides: Sequence[str], command: Sequence[str]
    ) -> "SweepFolder":
        """Create a folder below `runs_dir`/sweeps. Raises RunFolderError."""
        now = datetime.now(UTC)
        path = _allocate(runs_dir / SWEEPS, f"{now:%Y-%m-%d_%H-%M-%S}")
        (path / "jobs").mkdir()
        secrets = known_secrets({})
        hidden = [hide_assignments(override, secrets) for override in overrides]
        record = SweepRecord(
            stamp=path.name,
            status="running",
            attempt=1,
            command=[hide_assignments(word, secrets) for word in command],
            overrides=hidden,
            signature=try_to_sign(_signed_text(hidden)),
            created=now,
            ended=None,
            process=ProcessId.of_this_process(),
            jobs=[],
        )
        folder = cls(path, record)
        folder.write()
        return folder

    @classmethod
    def open(cls, path: Path) -> "SweepFolder":
        if not (path / "sweep.json").is_file():
            raise RunFolderError(
                f"{path} is not the folder of a sweep: it has no sweep.json; expected one such as "
                f"runs/{SWEEPS}/2026-11-20_14-30-05"
            )
        try:
            return cls(path, SweepRecord.model_validate(read_json(path / "sweep.json")))
        except ValidationError as error:
            raise RunFolderError(
                f"{path / 'sweep.json'} is damaged: {first_problem(error)}"
            ) from error

    def check_trust(self) -> None:
        """Check that this user made the sweep and its unfinished runs, in this current folder.

        Raises RunFolderError: another user made them, or they were changed, or made elsewhere.
        """
        why = why_untrusted(_signed_text(self.record.overrides), self.record.signature)
        if why is not None:
            overrides = "".join(f"\n  {as_ascii(each)}" for each in self.record.overrides)
            raise RunFolderError(
                f"{self.path} is not trusted: {why}, it was changed, or it was started in another "
                f"folder than {Path.cwd()}. Its jobs are composed in the current folder, of:"
                f"{overrides}\nRead {self.path / 'sweep.json'}; if you trust who wrote it, repeat "
                "the command with --trust"
            )
        for job in self.record.jobs:
            job = self.refresh(job.index)
            run = None if job.status in OVER else self.run_folder(job.index)
            if run is not None:
                run.config_to_run()

    def write(self, **changes: Any) -> None:
        self.record = self.record.model_copy(update=changes)
        write_json(self.path / "sweep.json", self.record.model_dump(mode="json"))

    def end(self, status: Literal["finished", "failed", "interrupted"]) -> None:
        self.write(status=status, ended=datetime.now(UTC))

    def add_job(self, overrides: Sequence[str], trial: int | None = None) -> Job:
        """Append a job; the caller writes."""
        secrets = known_secrets({})
        job = Job(
            index=len(self.record.jobs),
            overrides=[hide_assignments(override, secrets) for override in overrides],
            trial=trial,
        )
        self.record.jobs.append(job)
        return job

    def change_job(self, index: int, **changes: Any) -> None:
        """Change the record of a job; the caller writes."""
        self.record.jobs[index] = self.record.jobs[index].model_copy(update=changes)

    def resume(self) -> None:
        """Take over a stopped sweep in this process; its stopped jobs wait again.

        Raises RunFolderError: the sweep, or one of its jobs, still runs on this machine.
        """
        record = self.record
        if record.status == "running" and record.process.alive:
            raise RunFolderError(
                f"sweep {record.stamp} is running (process {record.process.pid} on "
                f"{record.process.host}); stop it first"
            )
        for job in list(record.jobs):
            job = self.refresh(job.index)
            if job.status == "running" and self._runs_here(job.index):
                raise RunFolderError(
                    f"job {job.index} of sweep {record.stamp} is still running in {job.run}; wait "
                    "for it to end, or stop it"
                )
            if job.status not in OVER:
                self.change_job(job.index, status="waiting", cause=None)
        self.write(
            status="running",
            attempt=record.attempt + 1,
            ended=None,
            process=ProcessId.of_this_process(),
        )

    def refresh(self, index: int) -> Job:
        """Update a job from its file and its run; the caller writes."""
        job, found = self.record.jobs[index], read_job_file(self.path, index)
        if found is None or found.attempt < self.record.attempt or job.status in OVER:
            return job
        if found.folder is None:
            self.change_job(index, status="failed", cause=found.error)
            return self.record.jobs[index]
        run = RunFolder.open(self.path / found.folder)
        status, cause = run.status, run.record.cause
        if found.error is not None:
            status, cause = "failed", found.error
        elif status == "interrupted" and stop_mark(self.path, index).exists():
            status, cause = "pruned", None
        self.change_job(index, run=found.run, folder=found.folder, status=status, cause=cause)
        return self.record.jobs[index]

    def _runs_here(self, index: int) -> bool:
        """True if a running job is alive here; jobs on other machines cannot be checked."""
        run = self.run_folder(index)
        return run is not None and run.record.process.host == self.record.process.host

    def run_folder(self, index: int) -> RunFolder | None:
        folder = self.record.jobs[index].folder
        return None if folder is None else RunFolder.open(self.path / folder)


def find_newest_sweep(runs_dirs: Sequence[Path]) -> Path:
    """Return the folder of the newest sweep in these folders of runs.

    Raises RunFolderError if there is none, or one is damaged, which may be the newest.
    """
    paths = [path.parent for each in runs_dirs for path in each.glob(f"{SWEEPS}/*/sweep.json")]
    if not paths:
        raise RunFolderError(
            f"there is no sweep in {' or '.join(str(each / SWEEPS) for each in runs_dirs)}; name a "
            "sweep's folder, or the folder of all runs with --runs-dir"
        )
    return max(paths, key=lambda path: SweepFolder.open(path).record.created)


def _signed_text(overrides: Sequence[str]) -> str:
    return json.dumps(["sweep", str(Path.cwd()), *overrides])


def job_file(sweep: Path, index: int) -> Path:
    return sweep / "jobs" / f"{index:04d}.json"


def stop_mark(sweep: Path, index: int) -> Path:
    """Return the path of the file that asks one job to stop for good."""
    return sweep / "jobs" / f"{index:04d}.stop"


def stop_all_mark(sweep: Path, attempt: int) -> Path:
    """Return the path of the file that asks all jobs of an attempt to stop, queued ones too."""
    return sweep / f"stop_{attempt}"


def read_job_file(sweep: Path, index: int) -> JobFile | None:
    path = job_file(sweep, index)
    if not path.exists():
        return None
    try:
        return JobFile.model_validate(read_json(path))
    except ValidationError as error:
        raise RunFolderError(f"{path} is damaged: {first_problem(error)}") from error


def _allocate(parent: Path, stamp: str) -> Path:
    for number in count(1):
        path = parent / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise RunFolderError(
                f"cannot create the sweep's folder in {parent}: {error}; set runs_dir to a "
                "writable folder"
            ) from error
    raise AssertionError("an endless loop ended")
