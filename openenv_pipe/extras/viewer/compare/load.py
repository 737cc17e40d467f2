"""Load the runs of a comparison from their folders, in whatever state they are.

Runs of a sweep are those whose run.json has the sweep's stamp as `sweep`; sweep.json names the
jobs that never became a run.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openenv_pipe.config.diff import flat
from openenv_pipe.config.schema import PythonTarget, RunConfig
from openenv_pipe.config.unused_keys import idle_keys
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import (
    STAGES,
    env_of,
    is_outdated,
    read_during,
    read_reports,
    read_stages,
)
from openenv_pipe.runs.find import AT_START, find_folder, find_run, is_sweep
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.files import read_json
from openenv_pipe.system.resources import short_path

# Keys that are not compared.
NO_SETTINGS = ("seed", "name", "runs_dir", "model.template_time")

MAX_LOST_JOBS = 100  # that are listed; a sweep.json of somebody else may have 100,000


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    id: str
    path: Path
    status: str  # of RunFolder, or unreadable
    cause: str | None
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)  # dotted keys to values
    idle: Collection[str] = field(default=(), repr=False)  # those of these keys that have no effect
    num_steps: int | None = None
    duration_s: float | None = None
    # GRPO's records in metrics.jsonl
    steps: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    final: EvalReport | None = field(default=None, repr=False)
    reports: Sequence[EvalReport] = field(default=(), repr=False)  # those that belong to a step
    reproduces: str | None = None  # the id of the run that it ran again
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of run.json

    @property
    def step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    def values_of(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the values of those of the keys that the run has, and that have an effect."""
        active = (key for key in keys if key in self.settings and key not in self.idle)
        return {key: self.settings[key] for key in active}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The runs, and the jobs that never became one."""

    title: str
    runs: Sequence[FoundRun]
    lost_jobs: Sequence[str]  # each with its cause
    notes: Sequence[str] = ()  # which of the named runs are not compared


def find_runs(targets: Sequence[str], runs_dir: Path | None = None) -> Found:
    """Load the named runs, or those of one sweep, each once.

    A reproduction of another run is no result of its own, so it is left out among other runs.

    Raises RunFolderError.
    """
    if len(targets) == 1 and is_sweep(path := find_folder(targets[0], runs_dir)):
        return _find_sweep(path)
    folders = {_open(name, runs_dir).path.resolve(): None for name in targets}
    runs = [_read(path) for path in folders]
    own = [run for run in runs if run.reproduces is None] or runs
    notes = [
        f"{run.id} is left out: it is a reproduction of {run.reproduces}; name it alone to see it"
        for run in runs
        if run not in own
    ]
    return Found(title="Runs", runs=own, lost_jobs=[], notes=notes)


def _open(name: str, runs_dir: Path | None) -> RunFolder:
    if is_sweep(find_folder(name, runs_dir)):
        raise RunFolderError(f"{name} is a sweep; name it alone, or runs alone")
    return find_run(name, runs_dir)


def _find_sweep(path: Path) -> Found:
    stamp, runs_dir = path.resolve().name, path.resolve().parent.parent
    file = path / "sweep.json"
    jobs = _jobs(file) if file.is_file() else []
    folders = sorted(path.parent for path in runs_dir.glob("*/*/run.json"))
    runs = [_read(path) for path in folders if path.name.isdecimal() and _sweep_of(path) == stamp]
    without = [job for job in jobs if job.get("run") is None]
    lost = [
        f"job {job.get('index')} ({_words(job.get('overrides'))}): {job.get('status')}"
        f"{', ' + str(job['cause']) if job.get('cause') else ''}"
        for job in without[:MAX_LOST_JOBS]
    ]
    if len(without) > len(lost):
        lost.append(f"{len(without) - len(lost):,} more jobs without a run: see {file}")
    if not runs and not lost:
        raise RunFolderError(
            f"{path} has no runs: below {short_path(runs_dir)} no run.json has sweep={stamp!r}; "
            "name run folders instead"
        )
    return Found(title=f"Sweep {stamp}", runs=runs, lost_jobs=lost)


def _jobs(file: Path) -> list[dict[str, Any]]:
    sweep = read_json(file)
    jobs = sweep.get("jobs", []) if isinstance(sweep, dict) else None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise RunFolderError(f"{file} is damaged: expected a list of jobs")
    return jobs


def _words(overrides: Any) -> str:
    return " ".join(map(str, overrides)) if isinstance(overrides, list) else str(overrides)


def _sweep_of(path: Path) -> str | None:
    try:
        record = read_json(path / "run.json")
    except RunFolderError:
        return None
    return record.get("sweep") if isinstance(record, dict) else None


def _read(path: Path) -> FoundRun:
    """Load a run, even if one of its files is damaged."""
    name = f"{path.parent.name}/{path.name}"
    try:
        folder = RunFolder.open(path)
        config = folder.written_config
        stages = read_stages(path)
        settings = dict(_settings(config))
        records = read_metrics(folder.metrics_path)
        steps = [record for record in records if record.get("stage") == "grpo"]
        if folder.status == "finished" and folder.record.cause is None and steps:
            # A run that was asked for fewer steps than its configuration has, as by `reproduce
            # --steps`, is no seed of the runs that took all. Early stops have a cause.
            settings["trainer.steps"] = steps[-1]["step"]
        lineage = folder.record.lineage
        return FoundRun(
            id=folder.record.id,
            path=Path(short_path(path)),
            status=folder.status,
            cause=folder.record.cause,
            seed=config.seed,
            settings=settings,
            # What an engine of the run's own can do is only known once its code is imported.
            idle=() if isinstance(config.engine, PythonTarget) else idle_keys(config, settings),
            num_steps=config.trainer.steps,
            duration_s=folder.duration_s,
            steps=steps,
            final=_final(folder, stages, records),
            reports=[*stages.values(), *read_during(path)],
            reproduces=lineage.run if lineage and lineage.kind == "reproduction" else None,
            facts=folder.record.facts,
        )
    except (RunFolderError, OSError, LookupError, TypeError, AttributeError) as error:
        return FoundRun(id=name, path=Path(short_path(path)), status="unreadable", cause=str(error))


def _final(
    folder: RunFolder, stages: Mapping[str, EvalReport], records: Sequence[Mapping[str, Any]]
) -> EvalReport | None:
    """Return the report after training; for a finished run without one, its last report.

    What a run measured before it trained, or before it trained on, is never its result.
    """
    trained = stages.get("trained")
    if trained is not None and not is_outdated(trained, records):
        return trained
    if folder.status != "finished":
        return None
    reports = read_reports(folder.path)
    others = [*stages.values()] or [*reports.values()]
    if records:
        last = records[-1]["step"] if records[-1].get("stage") == "grpo" else 0
        others = [
            report
            for report in reports.values()
            if report.step == last
            and not report.label.startswith((STAGES[0], AT_START))
            and not env_of(report.label)
        ]
    return others[-1] if others else None


def _settings(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a configuration, except the seed and what is derived from it."""
    for key, value in flat(config.model_dump(mode="json")).items():
        if key not in NO_SETTINGS and not (key == "model.seed" and value == config.seed):
            yield key, json.dumps(value) if isinstance(value, dict | list) else value
