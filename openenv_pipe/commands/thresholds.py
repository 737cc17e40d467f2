"""Thresholds of an evaluation, for CI: `eval --fail-under success=0.8`."""

from collections.abc import Mapping, Sequence

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.errors import UserError
from openenv_pipe.reports.eval_table import Row
from openenv_pipe.runs.evals import env_of
from openenv_pipe.system.intervals import Interval

METRICS = ("success", "reward")


def parse_thresholds(texts: Sequence[str]) -> dict[str, float]:
    """Return the least mean of each metric. Raises UserError."""
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


def compare_with_thresholds(rows: Sequence[Row], thresholds: Mapping[str, float]) -> list[Line]:
    """Return a line for each mean. It fails if it is below its threshold or was not measured.

    Thresholds are about the first environment of a run.
    """
    lines = []
    for row in rows:
        if env_of(row.report.label):
            continue
        for metric, least in thresholds.items():
            seen: Interval | None = getattr(row.report, metric)
            if seen is None:
                result, text = Result.FAIL, f"was not measured, so it is not {least:g}"
            elif seen.mean < least:
                result, text = Result.FAIL, f"{seen.mean:.3f} is below {least:g}"
            else:
                result, text = Result.OK, f"{seen.mean:.3f} is at least {least:g}"
            lines.append(Line(f"{row.name}: {metric}", result, text))
    return lines
