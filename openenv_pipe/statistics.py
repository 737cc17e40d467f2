"""Intervals for means over tasks, by the percentile bootstrap.

Several samples of one task resemble each other, so tasks, not samples, are drawn again: the
cluster bootstrap. Every task counts the same, however many of its samples did not fail.

Refuses values that are not finite. The width of an interval over a handful of tasks is a guess.

B. Efron, R. Tibshirani, An Introduction to the Bootstrap, 1993, chapters 8 and 13.
C. Field, A. Welsh, Bootstrapping clustered data, J. R. Stat. Soc. B 69, 2007.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

ValuesByTask = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over tasks and the limits of its confidence interval, in the values' unit."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


def bootstrap_interval(
    values_by_task: ValuesByTask, *, num_resamples: int, confidence: float, seed: int
) -> Interval | None:
    """The mean over tasks of each task's mean; tasks without values are left out.

    None if no task has a value. Raises ValueError for a value that is not finite.
    """
    means_N = numpy.array([numpy.mean(values) for values in values_by_task if len(values)])
    return _interval(means_N, num_resamples, confidence, seed)


def paired_difference(
    before_by_task: ValuesByTask,
    after_by_task: ValuesByTask,
    *,
    num_resamples: int,
    confidence: float,
    seed: int,
) -> Interval | None:
    """The mean over tasks of (after - before); row i of both is the same task.

    Pairing removes how hard the tasks are from the interval. Tasks that lack values on either
    side are left out; None if all do. Raises ValueError for a value that is not finite.
    """
    differences_N = numpy.array(
        [
            numpy.mean(after) - numpy.mean(before)
            for before, after in zip(before_by_task, after_by_task, strict=True)
            if len(before) and len(after)
        ]
    )
    return _interval(differences_N, num_resamples, confidence, seed)


def _interval(
    values_N: numpy.ndarray, num_resamples: int, confidence: float, seed: int
) -> Interval | None:
    """Percentile interval of the mean. N: tasks, R: resamples."""
    if not values_N.size:
        return None
    if not numpy.isfinite(values_N).all():
        raise ValueError("an interval needs finite values; got NaN or infinity")
    draws_RN = numpy.random.default_rng(seed).integers(
        values_N.size, size=(num_resamples, values_N.size)
    )
    means_R = values_N[draws_RN].mean(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = numpy.quantile(means_R, [tail, 1.0 - tail])
    return Interval(mean=float(values_N.mean()), low=float(low), high=float(high))
