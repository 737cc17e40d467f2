"""Check that a task is the same each time it is played, except for clocks."""

import random
from collections.abc import AsyncIterator

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.client.session import Session
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.extras.lab.episodes import leaves, play_to_end
from openenv_pipe.extras.lab.times import is_clock

NUM_TASKS = 8


async def probe_seeds(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Play the first tasks repeatedly: equal actions must get equal answers."""
    num_tasks = min(NUM_TASKS, len(subject.tasks))
    async with subject.session() as session:
        plays = [await subject.play(session, index, subject.best) for index in range(num_tasks)]
        again = [await subject.play(session, index, subject.best) for index in range(num_tasks)]
        interrupted = await _after_interruption(subject, session)
    async with subject.session() as session:
        fresh = await subject.play(session, num_tasks - 1, subject.best)
    yield same_seed_line(plays, again)
    if are_alike(plays[0], interrupted):
        text = "starts anew after done and in the middle of an episode"
        yield Line("reset again", Result.OK, text)
    else:
        text = "a task differs after an episode that was left in the middle"
        yield Line("reset again", Result.FAIL, text)
    if are_alike(plays[-1], fresh):
        yield Line("fresh session", Result.OK, "a task is the same in a new session")
    else:
        text = "a task differs in a new session, and a group's members play in several"
        yield Line("fresh session", Result.FAIL, text)


async def _after_interruption(subject: EnvironmentUnderTest, session: Session) -> PlayedEpisode:
    one_turn = subject.env.model_copy(update={"max_turns": 1})
    left = PlayedEpisode(task=subject.task(NUM_TASKS - 1))
    await play_to_end(session, left, subject.best, one_turn, random.Random(0))
    return await subject.play(session, 0, subject.best)


def same_seed_line(plays: list[PlayedEpisode], again: list[PlayedEpisode]) -> Line:
    pairs = list(zip(plays, again, strict=True))
    num_unlike = sum(not are_alike(one, other) for one, other in pairs)
    if not num_unlike:
        differing = (_differences(one, other) or {} for one, other in pairs)
        clocks = sorted({name for each in differing for name in each if each[name]})
        besides = f", except for the clocks {', '.join(clocks)}" if clocks else ""
        text = f"{len(plays)} tasks played twice are the same{besides}"
        return Line("same seed", Result.OK, text)
    return Line(
        "same seed",
        Result.FAIL,
        f"{num_unlike} of {len(plays)} tasks differed when played twice: a group would compare "
        "episodes of different tasks, and no run could be reproduced; derive all randomness of "
        "reset and step from the seed",
    )


def are_alike(one: PlayedEpisode, other: PlayedEpisode) -> bool:
    differences = _differences(one, other)
    return differences is not None and all(differences.values())


def _differences(one: PlayedEpisode, other: PlayedEpisode) -> dict[str, bool] | None:
    """Return the paths of the values that differ, each with whether all of these are clocks.

    None if the episodes have different shapes.
    """
    found: dict[str, bool] = {}
    if len(one.comparable) != len(other.comparable):
        return None
    for (seen, *rest), (again, *others) in zip(one.comparable, other.comparable, strict=True):
        before, after = list(leaves(seen)), list(leaves(again))
        if rest != others or [path for path, _ in before] != [path for path, _ in after]:
            return None
        for (path, a), (_, b) in zip(before, after, strict=True):
            if a != b:
                found[path] = found.get(path, True) and is_clock(path, a, b)
    return found
