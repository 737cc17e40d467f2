"""Thresholds of an evaluation, for CI: `eval --fail-under success=0.8`."""

from collections.abc import Mapping, Sequence

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
    return thresholds


def below_thresholds(rows: Sequence[Row], thresholds: Mapping[str, float]) -> list[str]:
    """Return a sentence for each mean that is below its threshold, or was not measured.

    Thresholds are about the first environment of a run.
    """
    found = []
    for row in rows:
        if env_of(row.report.label):
            continue
        for metric, least in thresholds.items():
            seen: Interval | None = getattr(row.report, metric)
            if seen is None:
                found.append(f"{row.name}: {metric} was not measured, so it is not {least:g}")
            elif seen.mean < least:
                found.append(f"{row.name}: {metric} {seen:.3f} is below {least:g}")
    return found
