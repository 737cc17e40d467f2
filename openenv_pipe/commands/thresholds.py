"""Thresholds for CI: `eval --fail-under success=0.8`, and the same of `compare`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.errors import UserError
from openenv_pipe.reports.eval_table import Row
from openenv_pipe.runs.evals import env_of

METRICS = ("success", "reward")
Means = Mapping[str, Mapping[str, float]]  # by name and metric; what was not measured is missing


def parse_thresholds(texts: Sequence[str], junit: Path | None) -> dict[str, float]:
    """Return the least mean of each metric. Raises UserError.

    junit: the file that is to list them, if any.
    """
    if junit is not None and not texts:
        raise UserError(f"--junit {junit} lists thresholds; add --fail-under METRIC=VALUE")
    thresholds = {}
    for text in texts:
        metric, _, number = text.partition("=")
        try:
            thresholds[metric] = float(number)
        except ValueError:
            metric = ""
        if metric not in METRICS or not thresholds[metric] < float("inf"):
            raise UserError(
                f"--fail-under {text!r}: expected {' or '.join(METRICS)} and a number, as in "
                "success=0.8"
            )
    if not 0.0 <= (share := thresholds.get("success", 0.0)) <= 1.0:
        raise UserError(f"--fail-under success={share:g}: expected a share from 0 to 1, as in 0.8")
    return thresholds


def means_of(rows: Sequence[Row]) -> Means:
    """Return the means of evaluations, of the first environment of each run."""
    intervals = {
        row.name: {metric: getattr(row.report, metric) for metric in METRICS}
        for row in rows
        if not env_of(row.report.label)
    }
    return {
        name: {metric: seen.mean for metric, seen in each.items() if seen is not None}
        for name, each in intervals.items()
    }


def compare_with_thresholds(means: Means, thresholds: Mapping[str, float]) -> list[Line]:
    """Return a line for each mean. It fails if it is below its threshold or was not measured."""
    lines = []
    for name, seen in means.items():
        for metric, least in thresholds.items():
            if metric not in seen:
                result, text = Result.FAIL, f"was not measured, so it is not {least:g}"
            elif seen[metric] < least:
                result, text = Result.FAIL, f"{seen[metric]:.3f} is below {least:g}"
            else:
                result, text = Result.OK, f"{seen[metric]:.3f} is at least {least:g}"
            lines.append(Line(f"{name}: {metric}", result, text))
    return lines
