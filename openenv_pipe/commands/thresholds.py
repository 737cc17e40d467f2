"""Thresholds for CI: `--fail-under success=0.8` of `eval` and `compare`, and `--fail-if-worse`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.schema import EvalConfig
from openenv_pipe.errors import UserError
from openenv_pipe.reports.eval_table import Row
from openenv_pipe.runs.eval_difference import MEASURES, ReportDifference, compare_reports
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import env_of
from openenv_pipe.system.intervals import Interval

METRICS = ("success", "reward")
MANY_TASKS = 10_000  # more than most environments have
MORE_TASKS = "evaluate on more tasks (eval.num_tasks)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The means of an evaluation, or of several with different seeds."""

    means: Mapping[str, float]  # by metric; what was not measured is missing
    # By metric: why its mean decides nothing, however high it is.
    objections: Mapping[str, str] = field(default_factory=dict)
    duration_s: float | None = None  # how long it took to measure them


def parse_thresholds(texts: Sequence[str]) -> dict[str, float]:
    """Return the least mean of each metric. Raises UserError."""
    thresholds = _numbers("--fail-under", texts, "success=0.8")
    if not 0.0 <= (share := thresholds.get("success", 0.0)) <= 1.0:
        raise UserError(f"--fail-under success={share:g}: expected a share from 0 to 1, as in 0.8")
    return thresholds


def parse_margins(texts: Sequence[str], num_runs: int) -> dict[str, float]:
    """Return by metric how much lower a mean may be than the first one's. Raises UserError."""
    margins = _numbers("--fail-if-worse", texts, "success=0.05")
    if margins and num_runs < 2:
        raise UserError("--fail-if-worse compares runs with the first one; name two or more")
    for metric, margin in margins.items():
        if margin < 0:
            raise UserError(
                f"--fail-if-worse {metric}={margin:g}: expected how much lower it may be"
            )
    return margins


def reject_empty_junit(junit: Path | None, thresholds: Sequence[str]) -> None:
    """Raise UserError if a JUnit file is wanted, and there is nothing to list in it."""
    if junit is not None and not thresholds:
        raise UserError(f"--junit {junit} lists thresholds; add --fail-under METRIC=VALUE")


def _numbers(option: str, texts: Sequence[str], example: str) -> dict[str, float]:
    numbers = {}
    for text in texts:
        metric, _, number = text.partition("=")
        try:
            numbers[metric] = float(number)
        except ValueError:
            metric = ""
        if metric not in METRICS or not numbers[metric] < float("inf"):
            raise UserError(
                f"{option} {text!r}: expected {' or '.join(METRICS)} and a number, as in {example}"
            )
    return numbers


def measured_of(rows: Sequence[Row], min_share: float) -> dict[str, Measured]:
    """Return, by name, what evaluations have measured in the first environment of each run.

    min_share: `eval.min_scored_share`.
    """
    found = {}
    for row in rows:
        if not env_of(row.report.label):
            intervals = {metric: getattr(row.report, metric) for metric in METRICS}
            objections = {
                metric: row.objection or too_few_measured(row.report, metric, min_share)
                for metric in METRICS
            }
            found[row.name] = Measured(
                means={key: seen.mean for key, seen in intervals.items() if seen is not None},
                objections={key: why for key, why in objections.items() if why is not None},
                duration_s=row.duration_s,
            )
    return found


def too_few_measured(
    report: EvalReport | ReportDifference, metric: str, min_share: float
) -> str | None:
    """Return in how few of its tasks a report has a metric, if these are too few for a decision.

    A judge whose budget is spent leaves episodes with a success and without a reward.
    """
    num = _num_measured(report, metric)
    if num in (0, report.num_tasks) or num >= max(2.0, min_share * report.num_tasks):
        return None
    return f"{_on_tasks(report, metric)}, too few (eval.min_scored_share)"


def _num_measured(report: EvalReport | ReportDifference, metric: str) -> int:
    if isinstance(report, ReportDifference):
        return report.num_measured[metric]
    return sum(bool(MEASURES[metric](task)) for task in report.tasks)


def _on_tasks(report: EvalReport | ReportDifference, metric: str) -> str:
    """Return the tasks that the mean of a metric is over, for sentences."""
    num = _num_measured(report, metric)
    if num == report.num_scored_tasks:
        return report.on_tasks
    return f"{num} of {report.num_tasks} tasks with a {metric}"


def compare_with_thresholds(
    measured: Mapping[str, Measured], thresholds: Mapping[str, float]
) -> list[Line]:
    """Return a line for each mean. It fails if it is below its threshold, was not measured, or
    decides nothing."""
    lines = []
    for name, found in measured.items():
        for metric, least in thresholds.items():
            seen = found.means.get(metric)
            if seen is None:
                result, text = Result.FAIL, f"was not measured; it has to be {least:g}"
            elif seen < least:
                result, text = Result.FAIL, f"{seen:.3f} < {least:g}"
            elif objection := found.objections.get(metric):
                result, text = Result.FAIL, f"{seen:.3f} >= {least:g}, but {objection}"
            else:
                result, text = Result.OK, f"{seen:.3f} >= {least:g}"
            lines.append(Line(f"{name}: {metric}", result, text, duration_s=found.duration_s))
    return lines


def compare_with_first(
    rows: Sequence[Row], margins: Mapping[str, float], config: EvalConfig, seed: int
) -> list[Line]:
    """Return a line for each evaluation after the first, on the tasks that both have.

    A line fails if the mean is lower by more than is allowed and the paired interval excludes 0, so
    that the loss is not due to chance; or if the two cannot be compared or decide nothing. It is a
    warning if the interval includes a larger loss than is allowed.

    margins: how much lower a mean may be, by metric
    """
    own = [row for row in rows if not env_of(row.report.label)]
    lines = []
    for row in own[1:]:
        for metric, margin in margins.items():
            name = f"{row.name} against {own[0].name}: {metric}"
            try:
                found = compare_reports(own[0].report, row.report, config, seed)
            except UserError as error:
                lines.append(Line(name, Result.FAIL, str(error)))
                continue
            too_few = too_few_measured(found, metric, config.min_scored_share)
            objection = row.objection or own[0].objection or too_few
            result, text = _judged(found, metric, margin, objection)
            lines.append(Line(name, result, text, duration_s=row.duration_s))
    return lines


def _judged(
    found: ReportDifference, metric: str, margin: float, objection: str | None
) -> tuple[Result, str]:
    """Judge one difference; it is a warning if too few tasks exclude a loss that is too large."""
    change: Interval | None = getattr(found, metric)
    if change is None:
        return Result.FAIL, "was not measured in both"
    text = f"{change:+.3f}, where a loss of {margin:g} is allowed"
    if objection is not None:
        return Result.FAIL, f"{text}, but {objection}"
    if change.low is None or change.high is None:
        return Result.WARN, f"{text}; {_on_tasks(found, metric)} give no interval, {MORE_TASKS}"
    if change.mean < -margin and change.high < 0:
        return Result.FAIL, text
    if change.low >= -margin:
        return Result.OK, text
    how = "so it may be chance" if change.mean < -margin else "so a larger loss may be hidden"
    advice = _tasks_for(change.mean - change.low, margin, _num_measured(found, metric))
    on = _on_tasks(found, metric)
    return Result.WARN, f"{text}; the interval over {on} is wider, {how}: {advice}"


def _tasks_for(half_width: float, margin: float, num_tasks: int) -> str:
    """Say how many tasks give an interval of `margin` to each side; its width falls with the square
    root of their number."""
    if margin == 0 or (num := num_tasks * (half_width / margin) ** 2) > MANY_TASKS:
        return MORE_TASKS
    digit = 10 ** (len(str(math.ceil(num))) - 2) if num > 10 else 1
    return f"about {math.ceil(num / digit) * digit} tasks would show it (eval.num_tasks)"
