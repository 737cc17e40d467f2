"""Differences between two evaluation reports, paired by task."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from openenv_pipe.config.schema import EvalConfig
from openenv_pipe.errors import UserError
from openenv_pipe.runs.eval_report import EvalReport, FrozenModel, TaskScores, tasks_text
from openenv_pipe.system.intervals import FRACTIONS, Bounds, Interval, paired_difference

ValuesOf = Callable[[TaskScores], Sequence[float]]
MEASURES: Mapping[str, ValuesOf] = {
    "success": lambda task: task.successes,
    "reward": lambda task: task.rewards,
    "env_reward": lambda task: task.env_rewards,
    "turns": lambda task: task.turns,
}


class TaskChange(FrozenModel):
    """A task's success rates in two reports."""

    task: str
    before: float
    after: float


class ReportDifference(FrozenModel):
    """after - before over the tasks of both reports, paired by task."""

    before: str
    after: str
    num_tasks: int
    num_scored_tasks: int  # of these, in both reports
    success: Interval | None
    reward: Interval | None
    env_reward: Interval | None
    turns: Interval | None
    # by measure: the means before and after, over the tasks of its difference
    means: dict[str, tuple[float, float]]
    num_measured: dict[str, int]  # by measure: these tasks, which have values in both reports
    fixed: list[TaskChange]  # those whose success rose, the largest change first
    regressed: list[TaskChange]  # those whose success fell
    # expected numbers if each task's episodes were divided between the two reports at random
    fixed_by_chance: float
    regressed_by_chance: float

    @property
    def on_tasks(self) -> str:
        """The tasks that the differences are over, for sentences."""
        return tasks_text(self.num_scored_tasks, self.num_tasks)


def compare_reports(
    before: EvalReport, after: EvalReport, config: EvalConfig, seed: int
) -> ReportDifference:
    """Compute paired differences over the tasks (id, seed and keywords) that both reports have.

    Raises UserError: They have no task in common, or were played against different opponents.
    """
    if before.opponent != after.opponent:
        raise UserError(
            f"eval reports {before.label!r} and {after.label!r} were played against different "
            f"opponents, {before.opponent} and {after.opponent} (eval.opponent)"
        )
    old = {task.key: task for task in before.tasks}
    pairs = [(old[task.key], task) for task in after.tasks if task.key in old]
    if not pairs:
        raise UserError(
            f"eval reports {before.label!r} and {after.label!r} have no task in common; "
            "compare reports of the same environment, split and seeds"
        )

    def difference(values_of: ValuesOf, bounds: Bounds | None = None) -> Interval | None:
        return paired_difference(
            [values_of(first) for first, _ in pairs],
            [values_of(second) for _, second in pairs],
            num_resamples=config.num_resamples,
            confidence=config.confidence,
            seed=seed,
            bounds=bounds,
            min_share=config.min_scored_share,
        )

    changes = [_change(first, second) for first, second in pairs]
    rates = [each for each in changes if each is not None and each.before != each.after]
    rates.sort(key=lambda each: -abs(each.after - each.before))
    chances = [_chances(first.successes, second.successes) for first, second in pairs]
    return ReportDifference(
        before=before.label,
        after=after.label,
        num_tasks=len(pairs),
        num_scored_tasks=sum(bool(first.successes and second.successes) for first, second in pairs),
        success=difference(MEASURES["success"], FRACTIONS),
        reward=difference(MEASURES["reward"]),
        env_reward=difference(MEASURES["env_reward"]),
        turns=difference(MEASURES["turns"]),
        means={
            name: means for name, of in MEASURES.items() if (means := _means(pairs, of)) is not None
        },
        num_measured={
            name: sum(bool(of(first) and of(second)) for first, second in pairs)
            for name, of in MEASURES.items()
        },
        fixed=[each for each in rates if each.after > each.before],
        regressed=[each for each in rates if each.after < each.before],
        fixed_by_chance=math.fsum(rise for rise, _ in chances),
        regressed_by_chance=math.fsum(fall for _, fall in chances),
    )


def _means(
    pairs: Sequence[tuple[TaskScores, TaskScores]], values_of: ValuesOf
) -> tuple[float, float] | None:
    """Return the means before and after over the tasks with values in both; None without any."""
    values = [(values_of(first), values_of(second)) for first, second in pairs]
    scored = [(fmean(before), fmean(after)) for before, after in values if before and after]
    if not scored:
        return None
    return fmean(before for before, _ in scored), fmean(after for _, after in scored)


def _change(before: TaskScores, after: TaskScores) -> TaskChange | None:
    """Return the success rates of a task; None if it was not scored in both."""
    if not before.successes or not after.successes:
        return None
    return TaskChange(task=after.task, before=fmean(before.successes), after=fmean(after.successes))


def _chances(before: Sequence[bool], after: Sequence[bool]) -> tuple[float, float]:
    """Return the probabilities that a task's success rises and that it falls by chance alone.

    They are those of the permutation test: which episodes are the later ones is drawn at random, so
    the number of successes among these is hypergeometric. Without episodes, both are 0.
    """
    num_before, num_after = len(before), len(after)
    num_solved = sum(before) + sum(after)
    rise = fall = 0  # may be too large for floats
    for later in range(max(0, num_solved - num_before), min(num_solved, num_after) + 1):
        ways = math.comb(num_after, later) * math.comb(num_before, num_solved - later)
        change = later * num_before - (num_solved - later) * num_after
        rise += ways * (change > 0)
        fall += ways * (change < 0)
    total = math.comb(num_before + num_after, num_solved)
    return rise / total, fall / total
