"""Evaluation reports: what episodes say about a model, and how two reports compare.

Pure functions of episodes. Failed episodes are counted, never scored: a dead server must not
look like a bad model.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from openenv_pipe.config.schema import EvalConfig
from openenv_pipe.errors import UserError
from openenv_pipe.statistics import Interval, bootstrap_interval, paired_difference
from openenv_pipe.types import Episode


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskScores(_Frozen):
    """One task's episodes that did not fail: the lists have one entry for each."""

    task: str
    task_seed: int
    seeds: list[int]
    successes: list[bool]
    rewards: list[float]
    turns: list[int]


class EvalReport(_Frozen):
    """One model on the eval tasks. An interval is None if every episode failed."""

    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]  # start, warm_start, trained, ...
    model: str
    num_tasks: int
    samples_per_task: int
    num_failed: int
    statuses: dict[str, int]
    success: Interval | None
    reward: Interval | None
    turns: Interval | None
    tasks: list[TaskScores]


class Comparison(_Frozen):
    """after - before over the tasks of both reports, paired by task."""

    before: str
    after: str
    num_tasks: int
    success: Interval | None
    reward: Interval | None
    turns: Interval | None


def summarise(
    label: str, episodes: Sequence[Episode], config: EvalConfig, seed: int, *, model: str
) -> EvalReport:
    """Group episodes by task and put intervals on their means. `seed` is the bootstrap's."""
    tasks = _scores_by_task(episodes)

    def interval(values_of: Callable[[TaskScores], Sequence[float]]) -> Interval | None:
        return bootstrap_interval(
            [values_of(task) for task in tasks],
            num_resamples=config.num_resamples,
            confidence=config.confidence,
            seed=seed,
        )

    return EvalReport(
        label=label,
        model=model,
        num_tasks=len(tasks),
        samples_per_task=config.samples_per_task,
        num_failed=sum(episode.failed for episode in episodes),
        statuses=dict(sorted(Counter(str(episode.status) for episode in episodes).items())),
        success=interval(lambda task: task.successes),
        reward=interval(lambda task: task.rewards),
        turns=interval(lambda task: task.turns),
        tasks=tasks,
    )


def compare(before: EvalReport, after: EvalReport, config: EvalConfig, seed: int) -> Comparison:
    """Paired differences over the tasks, by id and seed, that both reports have.

    Raises UserError if there is none: the reports are of different environments or splits.
    """
    old = {(task.task, task.task_seed): task for task in before.tasks}
    pairs = [
        (old[task.task, task.task_seed], task)
        for task in after.tasks
        if (task.task, task.task_seed) in old
    ]
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

    return Comparison(
        before=before.label,
        after=after.label,
        num_tasks=len(pairs),
        success=difference(lambda task: task.successes),
        reward=difference(lambda task: task.rewards),
        turns=difference(lambda task: task.turns),
    )


def _scores_by_task(episodes: Sequence[Episode]) -> list[TaskScores]:
    """One row for each task, in order of the tasks' indices, members in order."""
    by_task: dict[tuple[int, str, int], list[Episode]] = {}
    for episode in episodes:
        task = episode.task
        by_task.setdefault((task.index, task.id, task.seed), []).append(episode)
    return [_scores(played) for _, played in sorted(by_task.items())]


def _scores(episodes: Sequence[Episode]) -> TaskScores:
    scored = sorted((e for e in episodes if not e.failed), key=lambda episode: episode.member)
    return TaskScores(
        task=episodes[0].task.id,
        task_seed=episodes[0].task.seed,
        seeds=[episode.seed for episode in scored],
        successes=[episode.success for episode in scored],
        rewards=[episode.reward for episode in scored],
        turns=[len(episode.turns) for episode in scored],
    )
