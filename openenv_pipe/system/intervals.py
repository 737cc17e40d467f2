"""Confidence intervals for means over tasks and over runs, and pass@k.

Intervals over tasks use the percentile bootstrap. Samples of one task are correlated, so tasks, not
samples, are resampled (cluster bootstrap). Every task counts the same, however many of its samples
failed. Intervals over a few runs use Student's t, because the bootstrap of three values is far too
narrow. Over a handful of tasks the bootstrap is unreliable too.

B. Efron, R. Tibshirani, An Introduction to the Bootstrap, 1993, chapters 8 and 13.
C. Field, A. Welsh, Bootstrapping clustered data, J. R. Stat. Soc. B 69, 2007.
M. Chen et al., Evaluating Large Language Models Trained on Code, 2021, arXiv:2107.03374.
M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 1964, 26.7.3 and 26.7.4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy

ValuesByTask = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean and the limits of its confidence interval, in the values' unit."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


def bootstrap_interval(
    values_by_task: ValuesByTask, *, num_resamples: int, confidence: float, seed: int
) -> Interval | None:
    """Return the mean over tasks of each task's mean; tasks without values are left out.

    None if no task has a value.

    Raises:
        ValueError: A value is not finite.
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
    """Return the mean over tasks of (after - before); row i of both is the same task.

    Pairing removes the tasks' difficulty from the interval. Tasks that lack values on either side
    are left out; None if all do.

    Raises:
        ValueError: A value is not finite.
    """
    differences_N = numpy.array(
        [
            numpy.mean(after) - numpy.mean(before)
            for before, after in zip(before_by_task, after_by_task, strict=True)
            if len(before) and len(after)
        ]
    )
    return _interval(differences_N, num_resamples, confidence, seed)


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Return the probability that k samples, drawn without replacement, contain a success.

    This is the unbiased estimate of pass@k (Chen et al. 2021, equation 1).

    Raises:
        ValueError: There are fewer than k samples.
    """
    if not 0 < k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of a task; got {num_samples}")
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def interval_over_runs(values: Sequence[float], confidence: float) -> Interval | None:
    """Return the mean of independent runs with Student's t interval; None for fewer than two."""
    if len(values) < 2:
        return None
    _refuse_not_finite(numpy.array(values))
    mean = fmean(values)
    half = _t_quantile(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean=mean, low=mean - half, high=mean + half)


def _t_quantile(confidence: float, num_degrees: int) -> float:
    """Find t with P(|T| <= t) = `confidence`, by bisection of a closed form."""
    low, high = 0.0, math.pi / 2  # bounds of the angle atan(t / sqrt(num_degrees))
    for _ in range(100):
        middle = (low + high) / 2
        if _t_probability(middle, num_degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(num_degrees) * math.tan(low)


def _t_probability(angle: float, num_degrees: int) -> float:
    """Return P(|T| <= t), where t = sqrt(num_degrees) * tan(angle)."""
    odd = num_degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if num_degrees > 1 else 0.0
    for n in range(2 + odd, num_degrees, 2):
        term *= (n - 1) / n * math.cos(angle) ** 2
        total += term
    if odd:
        return (angle + math.sin(angle) * total) * 2 / math.pi
    return math.sin(angle) * total


def _refuse_not_finite(values_N: numpy.ndarray) -> None:
    if not numpy.isfinite(values_N).all():
        raise ValueError("an interval needs finite values; got NaN or infinity")


def _interval(
    values_N: numpy.ndarray, num_resamples: int, confidence: float, seed: int
) -> Interval | None:
    """Return the mean with its percentile interval. N: tasks, R: resamples."""
    if not values_N.size:
        return None
    _refuse_not_finite(values_N)
    draws_RN = numpy.random.default_rng(seed).integers(
        values_N.size, size=(num_resamples, values_N.size)
    )
    means_R = values_N[draws_RN].mean(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = numpy.quantile(means_R, [tail, 1.0 - tail])
    return Interval(mean=float(values_N.mean()), low=float(low), high=float(high))
