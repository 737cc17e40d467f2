"""Check that tasks differ, and that those of the evaluation are not those of training."""

from collections.abc import AsyncIterator, Sequence

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.tasks import Splits, TaskSet, split_warnings
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.check.seeds import are_alike
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.types import Task

NUM_TASKS = 8

Plays = Sequence[Sequence[PlayedEpisode]]  # by task, its episodes: one of each policy


async def probe_tasks(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Play the first tasks of both splits alike: at random, by the policy, by each baseline.

    The first policies that tell all training tasks apart suffice.
    """
    splits = Splits(train=subject.tasks, eval=subject.eval_tasks)
    for text in split_warnings(subject.env.tasks, splits):
        yield Line("tasks", Result.WARN, text)
    tasks, held_out = _first_tasks(subject.tasks), _first_tasks(subject.eval_tasks)
    if len(tasks) < 2:
        return
    plays: list[list[PlayedEpisode]] = [[] for _ in (*tasks, *held_out)]
    baselines = {f"baseline {name}": path for name, path in subject.env.baselines.items()}
    played = []
    for name in (*subject.choosers, *baselines):
        if _num_distinct(plays[: len(tasks)]) == len(tasks):
            break
        try:
            chooser = subject.choosers.get(name) or await subject.read_policy(baselines[name])
            found = await subject.play_alike([*tasks, *held_out], chooser)
        except ConfigError as error:
            yield Line(name, Result.WARN, f"it cannot be played: {error}")
            continue
        played.append(name)
        for each, play in zip(plays, found, strict=True):
            each.append(play)
    yield tasks_line(
        plays[: len(tasks)], plays[len(tasks) :], repeated=subject.repeated, policies=played
    )


def _first_tasks(tasks: TaskSet) -> list[Task]:
    return [tasks[index] for index in range(min(NUM_TASKS, len(tasks)))]


def _num_distinct(plays: Plays) -> int:
    return len({repr([play.comparable for play in each]) for each in plays})


def tasks_line(
    plays: Plays,
    eval_plays: Plays,
    *,
    repeated: Sequence[PlayedEpisode] = (),
    policies: Sequence[str] = ("random",),
) -> Line:
    """Say whether tasks differ, from episodes of both splits that were played alike.

    repeated: episodes of different training tasks with the same actions.
    policies: who played; random actions alone may all be answered alike, as wrong ones.
    """
    num_begun = len({repr(each[0].comparable[0]) for each in plays})
    count = _num_distinct(plays)
    measured = {"tasks": len(plays), "distinct": count}
    same = [str(index) for index, each in enumerate(eval_plays) if _is_among(each, plays)]
    # Where a few kinds of answers are all that was seen, unlike tasks may share them.
    if same and count > 1 and count in (num_begun, len(plays)):
        text = (
            f"{len(same)} of the first {len(eval_plays)} eval tasks ({', '.join(same)}) begin and "
            "answer as training tasks do under other seeds or keywords, so the evaluation repeats "
            "what was trained on; choose others for env.tasks.eval, if the environment has any"
        )
        return Line("tasks", Result.WARN, text, measured | {"repeated": len(same)})
    if num_begun > 1:
        text = f"{num_begun} of {len(plays)} begin differently"
        return Line("tasks", Result.OK, text, measured)
    text = f"{len(plays)} tasks begin with the same observation"
    if count > 1:
        text += f", and {count} of them answer equal actions differently"
        return Line("tasks", Result.OK, text, measured)
    if (num_answers := _num_distinct([[play] for play in repeated])) > 1:
        text += (
            f", and the actions of the best episode are answered in {num_answers} ways in "
            f"{len(repeated)} tasks"
        )
        return Line("tasks", Result.OK, text, measured)
    if list(policies) == ["random"]:
        text += (
            " and answer the same random actions alike, so it could not be told whether they "
            "differ; pass --policy"
        )
        return Line("tasks", Result.WARN, text, measured)
    text += (
        f" and answer equal actions alike ({', '.join(policies)}): reset seems to use neither the "
        "seed nor the keywords of env.tasks"
    )
    return Line("tasks", Result.WARN, text, measured)


def _is_among(held_out: Sequence[PlayedEpisode], plays: Plays) -> bool:
    """Return whether a training task is like the eval task in all that was played.

    An episode that failed has shown too little to tell.
    """
    if any(play.failure is not None for play in held_out):
        return False
    return any(
        all(are_alike(one, other) for one, other in zip(each, held_out, strict=True))
        for each in plays
    )
