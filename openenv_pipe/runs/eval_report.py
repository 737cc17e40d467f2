"""Evaluation reports: scores of a model's episodes, and differences between two reports.

These are pure functions of episodes. Failed episodes are counted but not scored, so that a dead
server does not look like a bad model.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from openenv_pipe.config.schema import EvalConfig
from openenv_pipe.errors import UserError
from openenv_pipe.system.intervals import Interval, bootstrap_interval, paired_difference, pass_at_k
from openenv_pipe.types import Episode, Task


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _finite(interval: Interval) -> Interval:
    if not all(map(math.isfinite, (interval.mean, interval.low, interval.high))):
        raise ValueError("the interval is not finite")
    return interval


FiniteInterval = Annotated[Interval, AfterValidator(_finite)]


class TaskScores(_Frozen):
    """The episodes of one task that have a reward; each list has an entry per episode."""

    task: str
    task_seed: int
    reset_digest: str  # of the reset keywords: tasks of equal id and seed may still differ
    num_failed: int  # episodes without a reward included
    seeds: list[int]
    successes: list[bool]
    rewards: list[float]
    turns: list[int]
    statuses: list[str]

    @property
    def key(self) -> tuple[str, int, str]:
        """The identity of the task."""
        return self.task, self.task_seed, self.reset_digest


class EvalReport(_Frozen):
    """One model on the eval tasks. An interval is None if every episode failed."""

    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]  # start, warm_start, trained, ...
    model: str
    step: int | None  # GRPO steps that trained the model; None: not trained by a run
    temperature: float | None  # None: a scripted policy
    num_tasks: int
    samples_per_task: int
    num_failed: int
    statuses: dict[str, int]  # counts over all episodes
    unsuccessful: dict[str, int]  # counts over those without success, failed ones included
    success: FiniteInterval | None
    reward: FiniteInterval | None
    turns: FiniteInterval | None
    pass_at: dict[int, FiniteInterval]  # for k = 2, 4, 8, ... and samples_per_task
    tasks: list[TaskScores]
    error: str | None = None  # why nothing could be played; of baselines only

    @property
    def num_unscored(self) -> int:
        """The number of episodes that did not fail and have no reward."""
        return sum(task.num_failed for task in self.tasks) - self.num_failed


class ReportDifference(_Frozen):
    """after - before over the tasks of both reports, paired by task."""

    before: str
    after: str
    num_tasks: int
    success: Interval | None
    reward: Interval | None
    turns: Interval | None


def summarise(
    label: str,
    episodes: Sequence[Episode],
    config: EvalConfig,
    seed: int,
    *,
    model: str,
    step: int | None,
    temperature: float | None,
) -> EvalReport:
    """Group episodes by task and compute means with intervals. `seed` is the bootstrap's."""
    tasks = _scores_by_task(episodes)
    samples_per_task = max(len(task.seeds) + task.num_failed for task in tasks)

    def interval(values_of: Callable[[TaskScores], Sequence[float]]) -> Interval | None:
        return bootstrap_interval(
            [values_of(task) for task in tasks],
            num_resamples=config.num_resamples,
            confidence=config.confidence,
            seed=seed,
        )

    pass_at = {k: interval(partial(_pass_at_k, k=k)) for k in _ks(samples_per_task)}
    return EvalReport(
        label=label,
        model=model,
        step=step,
        temperature=temperature,
        num_tasks=len(tasks),
        samples_per_task=samples_per_task,
        num_failed=sum(episode.failed for episode in episodes),
        statuses=_count_statuses(episodes),
        unsuccessful=_count_statuses([episode for episode in episodes if not _succeeded(episode)]),
        success=interval(lambda task: task.successes),
        reward=interval(lambda task: task.rewards),
        turns=interval(lambda task: task.turns),
        pass_at={k: found for k, found in pass_at.items() if found is not None},
        tasks=tasks,
    )


def unplayed(label: str, model: str, error: str) -> EvalReport:
    """Return the report of a scripted policy that could not be played."""
    return EvalReport(
        label=label,
        model=model,
        step=None,
        temperature=None,
        num_tasks=0,
        samples_per_task=0,
        num_failed=0,
        statuses={},
        unsuccessful={},
        success=None,
        reward=None,
        turns=None,
        pass_at={},
        tasks=[],
        error=error,
    )


def compare_reports(
    before: EvalReport, after: EvalReport, config: EvalConfig, seed: int
) -> ReportDifference:
    """Compute paired differences over the tasks (id, seed and keywords) that both reports have.

    Raises:
        UserError: They have no task in common.
    """
    old = {task.key: task for task in before.tasks}
    pairs = [(old[task.key], task) for task in after.tasks if task.key in old]
    if not pairs:
        raise UserError(
            f"eval reports {before.label!r} and {after.label!r} have no task in common; "
            "compare reports of the same environment, split and seeds"
        )

    def difference(values_of: Callable[[TaskScores], Sequence[float]]) -> Interval | None:
        return paired_difference(
            [values_of(first) for first, _ in pairs],
            [values_of(second) for _, second in pairs],
            num_resamples=config.num_resamples,
            confidence=config.confidence,
            seed=seed,
        )

    return ReportDifference(
        before=before.label,
        after=after.label,
        num_tasks=len(pairs),
        success=difference(lambda task: task.successes),
        reward=difference(lambda task: task.rewards),
        turns=difference(lambda task: task.turns),
    )


def _ks(num_samples: int) -> list[int]:
    """Return 2, 4, 8, ... and the number of samples; pass@1 is the success rate."""
    powers = [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples] if num_samples > 1 else []


def _pass_at_k(task: TaskScores, k: int) -> list[float]:
    """Return the task's estimate, or nothing if too many of its samples failed."""
    num_samples = len(task.successes)
    return [pass_at_k(num_samples, sum(task.successes), k)] if num_samples >= k else []


def _succeeded(episode: Episode) -> bool:
    return episode.success and not episode.failed


def _count_statuses(episodes: Sequence[Episode]) -> dict[str, int]:
    return dict(sorted(Counter(str(episode.status) for episode in episodes).items()))


def _scores_by_task(episodes: Sequence[Episode]) -> list[TaskScores]:
    """Return the scores of each task, in the order of task indices and members."""
    by_task: dict[tuple[int, str, int], list[Episode]] = {}
    for episode in episodes:
        task = episode.task
        by_task.setdefault((task.index, task.id, task.seed), []).append(episode)
    return [_scores(played) for _, played in sorted(by_task.items())]


def _scores(episodes: Sequence[Episode]) -> TaskScores:
    scored = sorted((e for e in episodes if e.is_scored), key=lambda episode: episode.member)
    task = episodes[0].task
    return TaskScores(
        task=task.id,
        task_seed=task.seed,
        reset_digest=_reset_digest(task),
        num_failed=len(episodes) - len(scored),
        seeds=[episode.seed for episode in scored],
        successes=[episode.success for episode in scored],
        rewards=[episode.reward for episode in scored],
        turns=[len(episode.turns) for episode in scored],
        statuses=[str(episode.status) for episode in scored],
    )


def _reset_digest(task: Task) -> str:
    """Return the first 64 bits of sha256 over the reset keywords, in hex."""
    text = json.dumps(task.reset, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
