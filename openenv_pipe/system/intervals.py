"""Confidence intervals for means over tasks and over runs, and pass@k.

Intervals over tasks use the percentile bootstrap. Samples of one task are correlated, so tasks, not
samples, are resampled (cluster bootstrap). Every task counts the same, however many of its samples
failed. Over a few tasks or runs the bootstrap is far too narrow: these intervals use Student's t.
Where all values are equal, both would have no width. Each limit is then as far from the mean as
another value can be, times how often it can occur (the exact binomial limit, Clopper and Pearson).

C. J. Clopper, E. S. Pearson, The use of confidence or fiducial limits illustrated in the case of
the binomial, Biometrika 26, 1934.
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

MIN_BOOTSTRAP = 10  # tasks; over fewer the percentile bootstrap is too narrow
ROUNDING = 1e-9  # relative difference below which means of tasks are equal

ValuesByTask = Sequence[Sequence[float]]
Bounds = tuple[float, float]  # between which all values lie
FRACTIONS: Bounds = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean and the limits of its confidence interval, in the values' unit."""

    mean: float
    low: float | None  # None, as `high`: the values allow no interval
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > 0.0 or self.high < 0.0

    def __format__(self, spec: str) -> str:
        """Return the mean and the limits, each in the format `spec`: `0.500 (0.300..0.700)`."""
        if self.low is None or self.high is None:
            return f"{self.mean:{spec}}"
        return f"{self.mean:{spec}} ({self.low:{spec}}..{self.high:{spec}})"


def bootstrap_interval(
    values_by_task: ValuesByTask,
    *,
    num_resamples: int,
    confidence: float,
    seed: int,
    bounds: Bounds | None = None,
    min_share: float = 0.0,
) -> Interval | None:
    """Return the mean over tasks of each task's mean; tasks without values are left out.

    None if no task has a value. It has no limits if fewer than two tasks, or than `min_share` of
    them, have values, or if all have the same one and no bounds are known.

    Raises ValueError: A value is not finite.
    """
    means_N = numpy.array([numpy.mean(values) for values in values_by_task if len(values)])
    if not means_N.size:
        return None
    _reject_not_finite(means_N)
    mean = float(means_N.mean())
    if means_N.size < max(2.0, min_share * len(values_by_task)):
        return Interval(mean=mean, low=None, high=None)
    if _are_equal(means_N):
        return _interval_of_equals(mean, means_N.size, confidence, bounds)
    if means_N.size < MIN_BOOTSTRAP:
        return interval_over_runs(means_N.tolist(), confidence, bounds)
    draws_RN = numpy.random.default_rng(seed).integers(
        means_N.size, size=(num_resamples, means_N.size)
    )
    tail = (1.0 - confidence) / 2.0
    low, high = numpy.quantile(means_N[draws_RN].mean(axis=1), [tail, 1.0 - tail])
    return Interval(mean=mean, low=float(low), high=float(high))


def paired_difference(
    before_by_task: ValuesByTask,
    after_by_task: ValuesByTask,
    *,
    num_resamples: int,
    confidence: float,
    seed: int,
    bounds: Bounds | None = None,
    min_share: float = 0.0,
) -> Interval | None:
    """Return the mean over tasks of (after - before); row i of both is the same task.

    Pairing removes the tasks' difficulty from the interval. Tasks that lack values on either side
    are left out; None if all do. The limits are as in `bootstrap_interval`. `bounds` are those of
    the values; None: the lowest and the highest of both sides.

    Raises ValueError: A value is not finite.
    """
    pairs = list(zip(before_by_task, after_by_task, strict=True))
    seen = [value for values in (*before_by_task, *after_by_task) for value in values] or [0.0]
    lowest, highest = bounds or (min(seen), max(seen))
    width = float(highest - lowest)
    return bootstrap_interval(
        [
            [float(numpy.mean(after) - numpy.mean(before))] if len(before) and len(after) else []
            for before, after in pairs
        ],
        num_resamples=num_resamples,
        confidence=confidence,
        seed=seed,
        bounds=(-width, width),
        min_share=min_share,
    )


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Return the probability that k samples, drawn without replacement, contain a success.

    This is the unbiased estimate of pass@k (Chen et al. 2021, equation 1).

    Raises ValueError: There are fewer than k samples.
    """
    if not 0 < k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of a task; got {num_samples}")
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def interval_over_runs(
    values: Sequence[float], confidence: float, bounds: Bounds | None = None
) -> Interval | None:
    """Return the mean of independent runs with Student's t interval; None for fewer than two.

    Equal values have no limits if no bounds are known.
    """
    if len(values) < 2:
        return None
    values_N = numpy.array(values)
    _reject_not_finite(values_N)
    mean = fmean(values)
    if _are_equal(values_N):
        return _interval_of_equals(mean, len(values), confidence, bounds)
    half = _t_quantile(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    lowest, highest = bounds or (-math.inf, math.inf)
    return Interval(mean=mean, low=max(mean - half, lowest), high=min(mean + half, highest))


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


def _reject_not_finite(values_N: numpy.ndarray) -> None:
    if not numpy.isfinite(values_N).all():
        raise ValueError("an interval needs finite values; got NaN or infinity")


def _are_equal(values_N: numpy.ndarray) -> bool:
    return bool(numpy.ptp(values_N) <= ROUNDING * numpy.abs(values_N).max())


def _interval_of_equals(
    value: float, number: int, confidence: float, bounds: Bounds | None
) -> Interval:
    """Return the interval of the mean of `number` equal values, as the module describes."""
    if bounds is None or bounds[0] == bounds[1]:
        return Interval(mean=value, low=None, high=None)
    share = ((1.0 - confidence) / 2.0) ** (1.0 / number)  # that have it, at the least
    low, high = (share * value + (1.0 - share) * bound for bound in bounds)
    return Interval(mean=value, low=low, high=high)
