"""The tables of evaluations: their scores, and the differences of each to the first."""

from collections.abc import Sequence
from dataclasses import dataclass

from openenv_pipe.config.schema import EvalConfig
from openenv_pipe.errors import UserError
from openenv_pipe.runs.eval_report import EvalReport, ReportDifference, compare_reports
from openenv_pipe.system.intervals import Interval
from openenv_pipe.system.markdown import UNKNOWN
from openenv_pipe.system.tables import Column, Fit, Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A report and the name of what was evaluated."""

    name: str
    report: EvalReport


def eval_tables(rows: Sequence[Row], config: EvalConfig, seed: int) -> list[Table]:
    """Return the table of scores and, if there are any, that of paired differences to the first."""
    first, *others = rows
    compared = [(row.name, _difference(first.report, row.report, config, seed)) for row in others]
    if any(change for _, change in compared):
        return [_scores(rows), _differences(first.name, compared, config)]
    return [_scores(rows)]


def _scores(rows: Sequence[Row]) -> Table:
    ks = sorted({k for row in rows for k in row.report.pass_at})
    table = Table(
        Column("eval"),
        Column("model", drop=5, fit=Fit.FOLD),
        Column("success"),
        *(Column(f"pass@{k}", drop=3) for k in ks),
        Column("reward", drop=1),
        Column("turns", drop=4),
        Column("failed", drop=2),
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
        Column(f"less {first}"),
        Column("tasks", drop=2),
        Column("success"),
        Column("reward", drop=1),
        Column("turns", drop=3),
        title=f"\nPaired by task, with {config.confidence:.0%} intervals; * excludes 0",
    )
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
