"""Print evaluations in one table, and the differences of each to the first."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table

from openenv_pipe.config.schema import EvalConfig
from openenv_pipe.errors import UserError
from openenv_pipe.runs.eval_report import EvalReport, ReportDifference, compare_reports
from openenv_pipe.system.intervals import Interval
from openenv_pipe.system.markdown import UNKNOWN

FILE_WIDTH = 1000  # columns when not on a terminal, so that no line is broken


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A report and the name of what was evaluated."""

    name: str
    report: EvalReport


def print_rows(rows: Sequence[Row], config: EvalConfig, seed: int) -> None:
    """Print the rows, and below them the paired differences to the first."""
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    console.print(_scores(rows))
    first, *others = rows
    compared = [(row.name, _difference(first.report, row.report, config, seed)) for row in others]
    if any(change for _, change in compared):
        console.print(_differences(first.name, compared, config))


def _scores(rows: Sequence[Row]) -> Table:
    ks = sorted({k for row in rows for k in row.report.pass_at})
    numbers = ["success", *(f"pass@{k}" for k in ks), "reward", "turns"]
    table = Table(
        Column("eval", no_wrap=True), "model", *numbers, "failed", box=None, pad_edge=False
    )
    for row in rows:
        report = row.report
        intervals = [
            report.success,
            *(report.pass_at.get(k) for k in ks),
            report.reward,
            report.turns,
        ]
        table.add_row(
            row.name,
            report.model,
            *map(_text, intervals),
            _failed(report),
        )
    return table


def _failed(report: EvalReport) -> str:
    if report.error is not None:
        return "not played"
    return f"{report.num_failed} of {sum(report.statuses.values())}"


def _differences(
    first: str, compared: Sequence[tuple[str, ReportDifference | None]], config: EvalConfig
) -> Table:
    table = Table(
        Column(f"less {first}", no_wrap=True), "tasks", "success", "reward", "turns",
        title=f"\nPaired by task, with {config.confidence:.0%} intervals; * excludes 0",
        title_justify="left", title_style="", box=None, pad_edge=False,
    )  # fmt: skip
    for name, change in compared:
        if change is None:
            table.add_row(name, "none in common", *[UNKNOWN] * 3)
        else:
            changes = (change.success, change.reward, change.turns)
            table.add_row(name, str(change.num_tasks), *map(_signed, changes))
    return table


def _difference(
    before: EvalReport, after: EvalReport, config: EvalConfig, seed: int
) -> ReportDifference | None:
    try:
        return compare_reports(before, after, config, seed)
    except UserError:  # It was evaluated on other tasks.
        return None


def _text(interval: Interval | None) -> str:
    if interval is None:
        return UNKNOWN
    return f"{interval.mean:.3f} ({interval.low:.2f}..{interval.high:.2f})"


def _signed(interval: Interval | None) -> str:
    if interval is None:
        return UNKNOWN
    mark = "*" if interval.excludes_zero else ""
    return f"{interval.mean:+.3f} ({interval.low:+.2f}..{interval.high:+.2f}){mark}"
