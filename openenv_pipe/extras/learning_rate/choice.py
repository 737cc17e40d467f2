"""What short runs at several learning rates have measured, and the rate that follows from it.

All of them start with the same weights and tasks, so the reward rises the most at the rate with the
highest reward in the last third of the steps. Standard errors of a reward are over its episodes,
and those of a rise over its groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from openenv_pipe.reports.alarm import WINDOW, Record, mean_of
from openenv_pipe.reports.alarms import AlarmWatch

MIN_STEPS = 2 * WINDOW  # from which on the guard sees a collapse
# Standard errors beyond which two means differ. The best of several rates is compared with the
# worst: of five that are equal, those two are further apart in one of forty searches.
NUM_ERRORS = 3.0
RISE_ERRORS = 2.0  # the same for the one comparison of a rate's last steps with its first


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    value: float
    error: float
    error_between_tasks: float  # for means over different tasks: groups are the samples

    @classmethod
    def of(cls, steps: Sequence[Record]) -> Self | None:
        known = [
            (_num_scored(step), step["reward/mean"], step["reward/std"])
            for step in steps
            if step.get("reward/mean") is not None
        ]
        total = sum(number for number, _, _ in known)
        if total < 2:
            return None
        value = math.fsum(number * mean for number, mean, _ in known) / total
        squares = math.fsum(n * (std**2 + (mean - value) ** 2) for n, mean, std in known)
        variance = squares / (total - 1)
        groups = [step.get("groups/trained", 0) + step.get("groups/skipped", 0) for step in steps]
        return cls(
            value=value,
            error=math.sqrt(variance / total),
            error_between_tasks=math.sqrt(variance / (min(sum(groups), total) or total)),
        )

    def is_above(self, other: "Mean") -> bool:
        return self.value - other.value > NUM_ERRORS * math.hypot(self.error, other.error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What some steps at one learning rate have measured; None: nothing.

    All values but `first`, `kl` and the alarms are of the last third of the steps.
    """

    lr: float
    run: str  # its id
    num_steps: int
    first: Mean | None  # the reward in the first third
    last: Mean | None
    success: float | None
    kl: float | None  # nats a token, from the policy before GRPO, at the last step that has it
    grad_norm: float | None
    unusable: float | None  # fraction of the replies
    collapses: Sequence[str]  # what the guard's alarms say
    failure: str | None  # why the run failed

    @classmethod
    def of(
        cls,
        lr: float,
        run: str,
        records: Sequence[Record],
        *,
        max_mismatch: float,
        failure: str | None,
    ) -> Self:
        """Measure the records of a run's steps of GRPO. max_mismatch: `trainer.max_mismatch`."""
        third = max(1, len(records) // 3)
        last = records[-third:]
        watch, collapses = AlarmWatch([], max_mismatch), list[str]()
        for record in records:
            watch.new_alarms(record)
            if watch.collapse is not None:
                collapses.append(watch.collapse.what)
        return cls(
            lr=lr,
            run=run,
            num_steps=len(records),
            first=Mean.of(records[:third]),
            last=Mean.of(last),
            success=mean_of(last, "success/rate"),
            kl=next((r["kl/start"] for r in reversed(records) if "kl/start" in r), None),
            grad_norm=mean_of(last, "grad/norm"),
            unusable=mean_of(last, "replies/unusable"),
            collapses=collapses,
            failure=failure,
        )

    @property
    def is_sound(self) -> bool:
        """Whether the rate has not destroyed the policy, as far as the steps show."""
        return self.failure is None and not self.collapses

    @property
    def rises(self) -> bool:
        """Whether the reward has risen beyond noise; each third has tasks of its own."""
        if self.first is None or self.last is None:
            return False
        noise = math.hypot(self.first.error_between_tasks, self.last.error_between_tasks)
        return self.last.value - self.first.value > RISE_ERRORS * noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    lr: float | None
    why: str  # a sentence


def choose(trials: Sequence[Trial]) -> Choice:
    """Choose the largest rate whose reward rises the most without an alarm.

    Among those within one standard error of the best reward, the largest is taken: it needs the
    fewest steps.
    """
    sound = [(trial, trial.last) for trial in trials if trial.is_sound and trial.last is not None]
    if not sound:
        smallest = min(trial.lr for trial in trials)
        return _none(f"every rate fails or raises an alarm; try rates below {smallest:g} (--rates)")
    best, highest = max(sound, key=lambda each: each[1].value)
    _, lowest = min(sound, key=lambda each: each[1].value)
    if len(sound) > 1 and not highest.is_above(lowest):
        return _none(
            f"the rewards of {len(sound)} rates, {lowest.value:.3g} to {highest.value:.3g}, differ "
            f"by no more than {NUM_ERRORS:g} standard errors, which is noise; take more steps "
            "(--steps) or episodes (trainer.tasks_per_step), or try rates further apart (--rates)"
        )
    rising = [(trial, mean) for trial, mean in sound if trial.rises]
    tied = [trial for trial, mean in rising if highest.value - mean.value <= highest.error]
    if not tied:
        return _none(
            f"at the best rate, {best.lr:g}, the reward does not rise beyond noise; take more "
            "steps (--steps), or try other rates (--rates)"
        )
    chosen = max(tied, key=lambda trial: trial.lr)
    assert chosen.first is not None and chosen.last is not None
    rise = f"from {chosen.first.value:.3g} to {chosen.last.value:.3g}"
    if chosen is best:
        why = f"at {chosen.lr:g} the reward rises the most, {rise}, without an alarm"
    else:
        why = (
            f"{chosen.lr:g} is the largest rate within a standard error of the highest reward "
            f"({highest.value:.3g}, at {best.lr:g}); its own rises {rise}, without an alarm"
        )
    return Choice(lr=chosen.lr, why=f"{why}{_reservations(chosen, trials)}")


def _reservations(chosen: Trial, trials: Sequence[Trial]) -> str:
    """Return why the choice may be wrong: too few steps, or a rate at the edge of those tried."""
    rates, text = [trial.lr for trial in trials], ""
    if chosen.num_steps < MIN_STEPS:
        text += f"; {chosen.num_steps} steps show no collapse, --steps {MIN_STEPS} may"
    if chosen.lr == max(rates):
        text += "; it is the largest that was tried, and a larger one may be better (--rates)"
    if chosen.lr == min(rates):
        text += "; it is the smallest that was tried, and a smaller one may be better (--rates)"
    return text


def _none(why: str) -> Choice:
    return Choice(lr=None, why=f"no choice: {why}")


def _num_scored(step: Record) -> int:
    unscored = (step.get(name) or 0 for name in ("episodes/failed", "judge/failed"))
    return int(step["episodes/count"] - sum(unscored))
