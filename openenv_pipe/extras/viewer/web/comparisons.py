"""The data of pages about several runs: settings that differ, sweeps, and evaluations by task."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from openenv_pipe.errors import PipeError, RunFolderError, UserError
from openenv_pipe.extras.viewer.compare.grouping import Comparison, compare_settings
from openenv_pipe.extras.viewer.compare.load import FoundRun, find_runs
from openenv_pipe.extras.viewer.web.run_store import NAME, RunStore
from openenv_pipe.runs.eval_difference import compare_reports
from openenv_pipe.runs.eval_report import EvalReport, TaskScores
from openenv_pipe.runs.evals import STAGES, is_outdated
from openenv_pipe.system.files import read_json

MAX_RUNS = 6  # that are laid over each other
MAX_TASKS = 2000
# What the page has of an evaluation.
SHOWN = (
    *("model", "step", "temperature", "num_tasks", "samples_per_task", "num_failed", "statuses"),
    *("success", "reward", "env_reward", "turns", "pass_at", "unusable", "error"),
)


def compare_runs(store: RunStore, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in which runs differ, with their results. Raises RunFolderError."""
    return _comparison(compare_settings(find_runs([str(store.path(key)) for key in _keys(query)])))


def list_sweeps(store: RunStore) -> list[dict[str, Any]]:
    """Return all sweeps, the newest first. One that cannot be read has only its problem."""
    found = []
    for path in sorted((store.runs_dir / "sweeps").glob("*/sweep.json"), reverse=True):
        stamp = path.parent.name
        try:
            content = read_json(path)
            statuses = [str(job["status"]) for job in content["jobs"]]
            words = " ".join(map(str, content["overrides"]))
            found.append(
                {"stamp": stamp, "status": str(content["status"]), "overrides": words}
                | {"jobs": {status: statuses.count(status) for status in sorted({*statuses})}}
            )
        except (RunFolderError, LookupError, TypeError) as error:
            found.append({"stamp": stamp, "status": "unreadable", "problem": str(error)})
    return found


def show_sweep(store: RunStore, stamp: str) -> dict[str, Any]:
    """Return a sweep's settings with their results. Raises RunFolderError."""
    path = store.runs_dir / "sweeps" / stamp
    if not NAME.fullmatch(stamp) or set(stamp) == {"."} or not path.is_dir():
        raise RunFolderError(f"there is no sweep {stamp!r:.80} in {store.runs_dir}")
    return _comparison(compare_settings(find_runs([str(path)])))


def show_evaluations(store: RunStore, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the evaluations of runs, their scores by task, and the difference between two.

    The two are `before` and `after`; without these, those that `_before_and_after` chooses.

    Raises RunFolderError: there is no such run.
    """
    keys = _keys(query)
    reports = {
        (label if len(keys) == 1 else f"{key} {label}"): report
        for key in keys
        for label, report in store.reports(key).items()
    }
    before, after = _before_and_after(store, keys[0], reports)
    before, after = query.get("before") or before, query.get("after") or after
    difference, problem = None, None
    if before in reports and after in reports and before != after:
        config = store.folder(keys[0]).written_config
        is_other = reports[before].other_scoring != reports[after].other_scoring
        try:
            if len(keys) == 1 and is_other:
                raise UserError(
                    f"{before} and {after} were scored by other code or settings (measured_with)"
                )
            found = compare_reports(reports[before], reports[after], config.eval, config.seed)
            difference = found.model_dump(mode="json") | {"on": found.on_tasks}
        except PipeError as error:
            problem = str(error)
    return {
        "reports": [_report(name, report) for name, report in reports.items()],
        "tasks": _tasks(reports),
        "before": before,
        "after": after,
        "difference": difference,
        "problem": problem,
    }


def _before_and_after(
    store: RunStore, first: str, reports: Mapping[str, EvalReport]
) -> tuple[str | None, str | None]:
    """Return the first and the last stage of the first run, each by its newest report.

    Without two that are not outdated, they are the first and the last evaluation of a model.
    """
    names = list(reports)
    own, records = names[: len(store.reports(first))], store.metrics(first).records
    newest = {  # Of equal labels, the newer comes later.
        reports[name].label: name for name in own if not is_outdated(reports[name], records)
    }
    chosen = [newest[label] for label in STAGES if label in newest]
    if len(chosen) < 2:
        chosen = [name for name in names if reports[name].step is not None] or names
    return (chosen[0], chosen[-1]) if chosen else (None, None)


def _keys(query: Mapping[str, str]) -> list[str]:
    keys = list(dict.fromkeys(key for key in query.get("runs", "").split(",") if key))
    if not 1 <= len(keys) <= MAX_RUNS:
        raise RunFolderError(f"{len(keys)} runs are named; expected 1 to {MAX_RUNS}")
    return keys


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "title": comparison.title,
        "keys": list(comparison.keys),
        "labels": dict(comparison.labels),
        "measures": list(comparison.measures),
        "best": comparison.best and comparison.best.name,
        "notes": list(comparison.notes),
        "lost_jobs": list(comparison.lost_jobs),
        "unreadable": [_key(run) for run in comparison.unreadable],
        "settings": [
            {
                "name": setting.name,
                "values": dict(setting.values),
                "statuses": setting.statuses,
                "runs": [_key(run) for run in setting.runs],
                "figures": {name: asdict(figure) for name, figure in setting.figures.items()},
            }
            for setting in comparison.settings
        ],
    }


def _key(run: FoundRun) -> str:
    return f"{run.path.parent.name}/{run.path.name}"


def _report(name: str, report: EvalReport) -> dict[str, Any]:
    shown = report.model_dump(mode="json", include=set(SHOWN))
    return {"name": name, "num_scored_tasks": report.num_scored_tasks, **shown}


def _tasks(reports: Mapping[str, EvalReport]) -> list[dict[str, Any]]:
    tasks: dict[tuple[str, int, str], dict[str, Any]] = {}
    for name, report in reports.items():
        for scores in report.tasks:
            row = tasks.setdefault(scores.key, {"task": scores.task, "scores": {}})
            row["scores"][name] = _scores(scores)
    return list(tasks.values())[:MAX_TASKS]


def _scores(scores: TaskScores) -> dict[str, Any]:
    def mean(values: Sequence[float]) -> float | None:
        return fmean(values) if values else None

    return {
        "success": mean(scores.successes),
        "reward": mean(scores.rewards),
        "num_episodes": len(scores.successes),
        "num_failed": scores.num_failed,
    }
