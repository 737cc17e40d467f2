"""The table of all runs. A broken folder is shown as unreadable."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rich.text import Text

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import BASELINE, is_outdated, read_reports, read_stages
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics, stage_of
from openenv_pipe.runs.tags import read_tags
from openenv_pipe.system.files import parse_json
from openenv_pipe.system.markdown import UNKNOWN, percent_text
from openenv_pipe.system.progress import clock
from openenv_pipe.system.tables import Column, Fit, Table

STATUS_STYLES = {
    "running": "cyan",
    "finished": "green",
    "interrupted": "yellow",
    "failed": "red",
    "died": "red",
    "unreadable": "magenta",
}
MAX_CAUSE = 80  # characters; report.md and run.json have all of it


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """What one line of the list says. None: not known (yet)."""

    id: str
    status: str  # a status of RunFolder, or unreadable
    problem: str | None = None  # the run's cause, or why the folder cannot be read
    origin: str | None = None  # the run that it was made from
    created: datetime | None = None
    duration_s: float | None = None
    step: int = 0  # steps of GRPO done, or of a supervised run
    num_steps: int | None = None  # also None: an evaluation of a model that no run has trained
    success: str = UNKNOWN  # of an evaluation, or before and after training
    reward: float | None = None  # of the last step, or of an evaluation without steps
    tags: tuple[str, ...] = ()


def list_runs(folders: Sequence[Path]) -> list[RunRow]:
    """One row for each run in the folders, by folder, name and number; [] without any.

    The id of a run that is not in the first folder has its folder before it.
    """
    rows = []
    for folder in folders:
        paths = [path for path in folder.glob("*/*") if path.name.isdecimal() and path.is_dir()]
        for path in sorted(paths, key=lambda path: (path.parent.name, int(path.name))):
            name = f"{path.parent.name}/{path.name}"
            rows.append(_row(path, name if folder == folders[0] else f"{folder}/{name}"))
    return rows


def runs_table(rows: list[RunRow]) -> Table:
    """The rows as a table for a terminal; with a column of tags if a run has some."""
    has_tags = any(row.tags for row in rows)
    table = Table(
        Column("run"),
        Column("status"),
        Column("created (UTC)", drop=4),
        Column("took", drop=3, justify="right"),
        Column("steps", justify="right"),
        Column("success", justify="right"),
        Column("reward (last step)", drop=1, justify="right"),
        *([Column("tags", drop=2, fit=Fit.FOLD)] if has_tags else []),
        Column("", drop=2, fit=Fit.CUT, style="dim"),
    )
    for row in rows:
        *cells, problem = _cells(row)
        tags = [", ".join(row.tags)] if has_tags else []
        table.add_row(*cells, *tags, problem)
    return table


def _row(path: Path, name: str) -> RunRow:
    try:
        folder = RunFolder.open(path)
        row = RunRow(
            id=name,
            status=folder.status,
            problem=folder.record.cause,
            origin=lineage.title if (lineage := folder.record.lineage) else None,
            created=folder.record.created,
            duration_s=folder.duration_s,
            tags=tuple(read_tags(path)),
        )
        if folder.record.purpose == "training":
            return _of_training(row, folder)
        # A model that no run has trained has no steps.
        reports = read_reports(path)
        report = next((reports[each] for each in reports if not each.startswith(BASELINE)), None)
        reward = report.reward.mean if report and report.reward else None
        return replace(row, success=_success(report), reward=reward)
    except (RunFolderError, OSError, LookupError, TypeError, AttributeError) as error:
        return RunRow(id=name, status="unreadable", problem=str(error))


def _of_training(row: RunRow, folder: RunFolder) -> RunRow:
    trainer = parse_json(folder.path / "config.json", folder.config_bytes)["trainer"]
    stage, num_steps = stage_of(trainer["steps"], trainer["warm_start"]["steps"])
    records = read_metrics(folder.metrics_path)
    steps = [r for r in records if r.get("stage") == stage]
    stages = read_stages(folder.path)
    reports = {name: each for name, each in stages.items() if not is_outdated(each, records)}
    start, trained = (_success(reports.get(label)) for label in ("start", "trained"))
    return replace(
        row,
        step=steps[-1]["step"] if steps else 0,
        num_steps=num_steps,
        success=UNKNOWN if start == trained == UNKNOWN else f"{start} → {trained}",
        reward=steps[-1].get("reward/mean") if steps else None,
    )


def _success(report: EvalReport | None) -> str:
    """Return an evaluation's success, with the number of tasks if some were not scored."""
    if report is None or report.success is None:
        return UNKNOWN
    is_partial = report.num_scored_tasks < report.num_tasks
    on = f" on {report.num_scored_tasks}/{report.num_tasks} tasks" if is_partial else ""
    return f"{percent_text(report.success.mean)}{on}"


def _cells(row: RunRow) -> list[str | Text]:
    style = STATUS_STYLES[row.status]
    cause = (row.problem or "").partition("\n")[0]
    if len(cause) > MAX_CAUSE and row.status != "unreadable":  # Only this table has that cause.
        cause = f"{cause[:MAX_CAUSE]}…"
    evaluation = "eval " if row.num_steps is None else ""
    return [
        row.id,
        Text(row.status, style),
        f"{row.created:%Y-%m-%d %H:%M}" if row.created else UNKNOWN,
        UNKNOWN if row.duration_s is None else clock(row.duration_s),
        UNKNOWN if row.num_steps is None else f"{row.step}/{row.num_steps}",
        row.success,
        UNKNOWN if row.reward is None else f"{evaluation}{row.reward:.3f}",
        "; ".join(filter(None, (row.origin, cause))),
    ]
