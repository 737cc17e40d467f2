"""What the table of runs and the head of a run's page say."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.web.run_store import Record, RunStore
from openenv_pipe.reports.alarm import mean_of
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import is_outdated
from openenv_pipe.runs.tags import read_tags

PACE_STEPS = 20  # last steps whose mean duration predicts the time that is left
RECENT_STEPS = 10  # last steps over which reward and success are averaged


def summarise_runs(store: RunStore) -> list[dict[str, Any]]:
    """Return a row for each run; a folder that cannot be read has only its problem."""
    return [summarise_run(store, key) for key in store.all_keys()]


def summarise_run(store: RunStore, key: str) -> dict[str, Any]:
    try:
        folder = store.folder(key)
    except (RunFolderError, OSError) as error:
        return {"key": key, "status": "unreadable", "problem": str(error)}
    config, metrics = store.config(key), store.metrics(key)
    records = metrics.records
    reports = {
        report.label: report
        for report in store.reports(key).values()
        if not is_outdated(report, records)
    }
    recent = [record for record in records if record["stage"] == "grpo"][-RECENT_STEPS:]
    stage, step, num_steps = _progress(config, records)
    status = folder.status
    return {
        "key": key,
        "status": status,
        "problem": folder.record.cause or metrics.problem,
        "created": folder.record.created.timestamp(),
        "duration_s": folder.duration_s,
        "stage": stage,
        "step": step,
        "num_steps": num_steps,
        "left_s": _left_s(records, stage, step, num_steps) if status == "running" else None,
        "reward": mean_of(recent, "reward/mean"),
        "success": mean_of(recent, "success/rate"),
        "success_start": _success(reports.get("start")),
        "success_trained": _success(reports.get("trained")),
        "num_tokens": sum(int(record.get("tokens/sampled") or 0) for record in records),
        "tokens_per_s": mean_of(recent, "time/tokens_per_s"),
        "env": _environments(config),
        "model": value_of(config, "model", "path") or value_of(config, "model", "type"),
        "loss": value_of(config, "trainer", "loss", "type"),
        "seed": value_of(config, "seed"),
        "sweep": folder.record.sweep,
        "tags": read_tags(folder.path),
        "lineage": folder.record.lineage and folder.record.lineage.model_dump(mode="json"),
    }


def _environments(config: Mapping[str, Any]) -> str | None:
    first, beside = value_of(config, "env", "name"), config.get("beside")
    others = beside if isinstance(beside, dict) else {}
    return " + ".join(map(str, (first, *others))) if first else None


def _progress(config: Mapping[str, Any], records: Sequence[Record]) -> tuple[str, int, int | None]:
    """Return the stage that wrote the last line, its step, and how many steps it has."""
    last: Record = records[-1] if records else {"stage": "start", "step": 0}
    stage = last["stage"]
    where = ("trainer", "warm_start", "steps") if stage == "warm_start" else ("trainer", "steps")
    num_steps = value_of(config, *where)
    return stage, last["step"], num_steps if isinstance(num_steps, int) else None


def _left_s(
    records: Sequence[Record], stage: str, step: int, num_steps: int | None
) -> float | None:
    last = [record for record in records[-PACE_STEPS:] if record["stage"] == stage]
    pace_s = mean_of(last, "time/step_s")
    return None if pace_s is None or num_steps is None else pace_s * max(num_steps - step, 0)


def _success(report: EvalReport | None) -> dict[str, Any] | None:
    if report is None or report.success is None:
        return None
    return {**asdict(report.success), "on": report.on_tasks}


def value_of(config: Any, *names: str) -> Any:
    """Return a value of a configuration that may be damaged; None if it is not there."""
    for name in names:
        config = config.get(name) if isinstance(config, dict) else None
    return config
