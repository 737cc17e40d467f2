"""Tolerances between two runs of one configuration whose sampler is not exact.

A sampler that differs from the trainer by m, the recorded mean of |log p_sampler - log p_trainer|
per token, differs between two runs by about as much. Two runs with equal seeds then choose
different tokens with a probability of about m / 2 (the total variation between distributions
whose log ratio is m on average, to first order), and an episode of L tokens differs with

    p = 1 - exp(-L t m / 2)        at step t: differences are trained on, t times over

Of n episodes at most K = n p + 4 sqrt(n p (1 - p)), rounded up, differ. Each may change its reward
by the whole spread of the step, so the step's mean by K / n of it, but never by more than two
independent samples would: 4 sqrt(2) standard errors of the mean over groups. Nor may the means of
an evaluation, whose standard errors are those of its intervals.

Checkpoints are not compared: they differ as soon as one token does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.types import Group

NUM_DEVIATIONS = 4.0
MISMATCH_FACTOR = 3.0  # by which the mismatch itself may grow between two runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """One number of both runs, and the allowed distance between them."""

    step: int
    metric: str
    expected: float
    seen: float
    width: float

    @property
    def holds(self) -> bool:
        return abs(self.seen - self.expected) <= self.width


def step_bands(
    step: int, mismatch: float, expected: Sequence[Group], seen: Sequence[Group]
) -> list[Band]:
    """Return the bands of a step's mean reward and success rate.

    mismatch: the recorded mean up to the step.
    """
    found = []
    for metric, name in (("reward/mean", "reward"), ("success/rate", "success")):
        old = [[float(getattr(each, name)) for each in group.scored] for group in expected]
        new = [float(getattr(each, name)) for group in seen for each in group.scored]
        flat = [each for group in old for each in group]
        if flat and new:
            episodes = [episode for group in expected for episode in group.scored]
            length = fmean(episode.num_completion_tokens for episode in episodes)
            width = _width([group for group in old if group], length, mismatch, step)
            found.append(
                Band(step=step, metric=metric, expected=fmean(flat), seen=fmean(new), width=width)
            )
    return found


def mismatch_band(step: int, expected: float, seen: float) -> Band:
    """Return the band of the mismatch itself, which detects a sampler that became worse."""
    width = (MISMATCH_FACTOR - 1.0) * expected + 1e-6
    return Band(step=step, metric="mismatch/mean", expected=expected, seen=seen, width=width)


def eval_bands(expected: EvalReport, seen: EvalReport, confidence: float) -> list[Band]:
    """Return the bands of an evaluation's means that have an interval in both runs.

    confidence: that of the intervals.
    """
    found = []
    for name in ("success", "reward", "env_reward", "turns"):
        old, new = getattr(expected, name), getattr(seen, name)
        if None in (old, new) or None in (old.low, new.low):
            continue
        halves = math.hypot(old.high - old.low, new.high - new.low) / 2.0
        width = NUM_DEVIATIONS * halves / NormalDist().inv_cdf(0.5 + confidence / 2.0)
        step, metric = expected.step or 0, f"eval/{expected.label}/{name}"
        found.append(Band(step=step, metric=metric, expected=old.mean, seen=new.mean, width=width))
    return found


def _width(groups: Sequence[Sequence[float]], length: float, mismatch: float, step: int) -> float:
    values = [value for group in groups for value in group]
    other_way = 1.0 - math.exp(-length * step * mismatch / 2.0)
    spread = NUM_DEVIATIONS * math.sqrt(len(values) * other_way * (1.0 - other_way))
    num_other = min(len(values), math.ceil(len(values) * other_way + spread))
    width = num_other / len(values) * (max(values) - min(values))
    if len(groups) > 1:
        error = stdev(fmean(group) for group in groups) / math.sqrt(len(groups))
        independent = NUM_DEVIATIONS * math.sqrt(2.0) * error
        width = min(width, independent) if independent else width
    return width
