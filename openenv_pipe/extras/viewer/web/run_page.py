"""The data of one run's page: its curves, alarms, evaluations and logs."""

import os
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.web.meanings import meanings
from openenv_pipe.extras.viewer.web.panels import panels_of
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.extras.viewer.web.summaries import summarise_run
from openenv_pipe.reports.alarms import LOOSEST_MISMATCH, find_alarms
from openenv_pipe.runs.checkpoints import StageStep, all_checkpoints, can_resume
from openenv_pipe.runs.metrics import MEMORY
from openenv_pipe.system.files import names_in, open_file
from openenv_pipe.system.resources import short_path
from openenv_pipe.system.secrets import redact

MAX_LOG_BYTES = 64 * 1024
MAX_LOGS = 200
LOG = re.compile(r"attempt_\d+/[\w.@+-]+")


def describe_run(store: RunStore, key: str) -> dict[str, Any]:
    """Return everything about a run but its curves and episodes."""
    folder = store.folder(key)
    record = folder.record
    return {
        **describe_progress(store, key),
        "command": " ".join(record.command),
        "versions": record.versions,
        "machine": record.machine.model_dump(mode="json"),
        "facts": record.facts,
        "attempts": [
            {"number": each.number, "status": each.status, "cause": each.cause}
            for each in record.attempts
        ],
        "overrides": folder.overrides,
        "config": store.config(key),
        "evaluations": list(store.reports(key)),
        "checkpoints": [str(step) for step in checkpoint_steps(folder.path)],
        "logs": logs_of(folder.path),
        "has_episodes": any((folder.path / "episodes").glob("step_*")),
    }


def describe_progress(store: RunStore, key: str) -> dict[str, Any]:
    records, folder = store.metrics(key).records, store.folder(key)
    return {
        **summarise_run(store, key),
        "memory_gib": next(
            (each[MEMORY] for each in reversed(records) if each.get(MEMORY) is not None), None
        ),
        "resume": (
            f"openenv-pipe train --resume {shlex.quote(short_path(folder.path))}"
            if folder.status != "running" and can_resume(folder.path, folder.record, folder.status)
            else None
        ),
        "alarms": [asdict(alarm) for alarm in find_alarms(records, _max_mismatch(store, key))],
    }


def _max_mismatch(store: RunStore, key: str) -> float:
    """Return trainer.max_mismatch; of a configuration that cannot be read, the loosest one."""
    try:
        return float(store.config(key)["trainer"]["max_mismatch"])
    except (LookupError, TypeError, ValueError):
        return LOOSEST_MISMATCH


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of GRPO that have a checkpoint, the newest first."""
    places = [StageStep.of(path) for path in all_checkpoints(folder)]
    return [place.step for place in reversed(places) if place.stage == "grpo"]


def curves(store: RunStore, key: str, *, epoch: int = 0, after: int = 0) -> dict[str, Any]:
    """Return the metrics as columns; only those of records from `after` on if `epoch` still holds.

    A resume replaces the file, and with it the epoch; then all columns are returned.
    """
    read = store.metrics(key)
    start = after if epoch == read.epoch and after <= len(read.records) else 0
    new = read.records[start:]
    return {
        "epoch": read.epoch,
        "start": start,
        "steps": [record["step"] for record in new],
        "stages": [record["stage"] for record in new],
        "values": {name: [record.get(name) for record in new] for name in read.names},
        "panels": panels_of(read.names),
        "evaluations": evaluation_points(store, key),
    }


def evaluation_points(store: RunStore, key: str) -> list[dict[str, Any]]:
    """Return the evaluations that belong to a step of training, with their intervals."""
    reports = [*store.reports(key).values(), *store.during(key)]
    return [
        {
            "label": report.label,
            "step": report.step,
            "success": report.success and asdict(report.success),
            "reward": report.reward and asdict(report.reward),
        }
        for report in sorted(reports, key=lambda each: each.step or 0)
        if report.step is not None
    ]


def explanations(names: list[str]) -> dict[str, Any]:
    """Return the texts about metrics, for a legend; numbers in a name stand for any number."""
    texts = meanings()
    found = {}
    for name in names:
        general = re.sub(r"/\d+/", "/", name)
        text = texts.get(name) or texts.get(general)
        if text is None and name.startswith("reward/"):
            text = texts.get("reward/NAME")
        if text is not None:
            found[name] = text
    return found


def logs_of(folder: Path) -> list[str]:
    """List the log files of all attempts, the newest attempt's first."""
    logs = folder / "logs"
    found = [f"{part}/{name}" for part in names_in(logs) for name in names_in(logs / part)]
    chosen = [
        name
        for name in found
        if LOG.fullmatch(name) and (logs / name).is_file() and not (logs / name).is_symlink()
    ]
    chosen.sort(key=lambda name: (-int(name.partition("/")[0][8:]), name))
    return chosen[:MAX_LOGS]


def tail(folder: Path, name: str) -> str:
    """Return the end of a log file, without secrets. Raises RunFolderError."""
    if not LOG.fullmatch(name) or ".." in name:
        raise RunFolderError(f"{name!r:.80} is not a log; expected one such as attempt_1/env-0.log")
    path = folder / "logs" / name
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
        content = file.read(MAX_LOG_BYTES)
    text = content.decode(errors="replace")
    if len(content) == MAX_LOG_BYTES:
        text = text.partition("\n")[2]
    return redact(text)
