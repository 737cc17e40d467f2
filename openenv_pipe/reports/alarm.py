"""What an alarm is, and the means over steps that alarms compare."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

WINDOW = 5  # steps that a mean is over

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One thing that goes wrong; `metric` is the curve to look at."""

    metric: str
    what: str
    advice: str
    at_once: bool = False  # True: one step says enough
    is_collapse: bool = False  # True: updates destroy the policy; `trainer.guard` says what to do


def ends_of(steps: Sequence[Record], name: str) -> tuple[float | None, float | None]:
    """Return the means over the first and the last steps; None while they overlap."""
    if len(steps) < 2 * WINDOW:
        return None, None
    return mean_of(steps[:WINDOW], name), mean_of(steps[-WINDOW:], name)


def mean_of(steps: Sequence[Record], name: str) -> float | None:
    """Return the mean of a metric over those steps that have it; None if none has."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return fmean(values) if values else None


def means_of(steps: Sequence[Record], name: str) -> list[float]:
    """Return the means over each `WINDOW` consecutive steps of those that have a metric."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return [fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]


def sum_of(steps: Sequence[Record], name: str) -> float | None:
    """Return the sum of a metric over the last steps; None if none of them has it."""
    values = [step[name] for step in steps[-WINDOW:] if step.get(name) is not None]
    return sum(values) if values else None


def share_of(steps: Sequence[Record], name: str, whole: str) -> float | None:
    """Return a metric as a fraction of another one, both summed over the last steps."""
    part, all_of_it = sum_of(steps, name), sum_of(steps, whole)
    return part / all_of_it if part is not None and all_of_it else None


def reward_error(steps: Sequence[Record]) -> float:
    """Return the standard error of the difference of two means of the reward over `WINDOW` steps.

    Tasks differ, so the count is that of the last steps' groups; the spread is that of all steps.
    """
    num_groups = sum(sum_of(steps, f"groups/{name}") or 0 for name in ("trained", "skipped"))
    return (mean_of(steps, "reward/std") or 0.0) * math.sqrt(2.0 / max(1, num_groups))
