"""Check that tasks differ."""

from collections.abc import AsyncIterator, Sequence

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.tasks import Splits, split_warnings
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest

NUM_TASKS = 8

Plays = Sequence[Sequence[PlayedEpisode]]  # by task, its episodes: one of each policy


async def probe_tasks(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Play the first training tasks alike: at random, by the policy, by each baseline.

    It ends as soon as the policies that have played tell all of these tasks apart.
    """
    splits = Splits(train=subject.tasks, eval=subject.eval_tasks)
    for text in split_warnings(subject.env.tasks, splits):
        yield Line("tasks", Result.WARN, text)
    tasks = [subject.tasks[index] for index in range(min(NUM_TASKS, len(subject.tasks)))]
    if len(tasks) < 2:
        return
    plays: list[list[PlayedEpisode]] = [[] for _ in tasks]
    baselines = {f"baseline {name}": path for name, path in subject.env.baselines.items()}
    played = []
    for name in (*subject.choosers, *baselines):
        if _num_distinct(plays) == len(tasks):
            break
        try:
            chooser = subject.choosers.get(name) or await subject.read_policy(baselines[name])
            found = await subject.play_alike(tasks, chooser)
        except ConfigError as error:
            yield Line(name, Result.WARN, f"it cannot be played: {error}")
            continue
        played.append(name)
        for each, play in zip(plays, found, strict=True):
            each.append(play)
    yield tasks_line(plays, repeated=subject.repeated, policies=played)


def _num_distinct(plays: Plays) -> int:
    return len({repr([play.comparable for play in each]) for each in plays})


def tasks_line(
    plays: Plays,
    *,
    repeated: Sequence[PlayedEpisode] = (),
    policies: Sequence[str] = ("random",),
) -> Line:
    """Say whether tasks differ, from episodes that were played alike.

    repeated: episodes of different training tasks with the same actions.
    policies: who played; random actions may all be answered alike, because all are wrong.
    """
    num_begun = len({repr(each[0].comparable[0]) for each in plays})
    count = _num_distinct(plays)
    measured = {"tasks": len(plays), "distinct": count}
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
