"""Check that a task is the same each time it is played, and that tasks differ."""

import random
from collections.abc import AsyncIterator

from openenv_pipe.commands.env.check.subject import EnvironmentUnderTest
from openenv_pipe.commands.env.episodes import PlayedEpisode, start_episode, take_step
from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.environments.client.session import Session

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
    yield _same_seed(plays, again)
    if plays[0].comparable == interrupted.comparable:
        text = "starts anew after done and in the middle of an episode"
        yield Line("reset again", Result.OK, text)
    else:
        text = "a task differs after an episode that was left in the middle"
        yield Line("reset again", Result.FAIL, text)
    if plays[-1].comparable == fresh.comparable:
        yield Line("fresh session", Result.OK, "a task is the same in a new session")
    else:
        text = "a task differs in a new session, and a group's members play in several"
        yield Line("fresh session", Result.FAIL, text)
    if num_tasks > 1:
        yield _distinct(plays)


async def _after_interruption(subject: EnvironmentUnderTest, session: Session) -> PlayedEpisode:
    """Play the first task after one step of another one."""
    play = await start_episode(session, subject.task(NUM_TASKS - 1), subject.env)
    if not play.done:
        for action in subject.best(play.observations, random.Random(0))[:1]:
            await take_step(session, play, action, subject.env)
    return await subject.play(session, 0, subject.best)


def _same_seed(plays: list[PlayedEpisode], again: list[PlayedEpisode]) -> Line:
    pairs = zip(plays, again, strict=True)
    num_unlike = sum(one.comparable != other.comparable for one, other in pairs)
    if not num_unlike:
        return Line("same seed", Result.OK, f"{len(plays)} tasks played twice are the same")
    return Line(
        "same seed",
        Result.FAIL,
        f"{num_unlike} of {len(plays)} tasks differed when played twice: a group would compare "
        "episodes of different tasks, and no run could be reproduced; derive all randomness of "
        "reset and step from the seed",
    )


def _distinct(plays: list[PlayedEpisode]) -> Line:
    count = len({repr(play.comparable) for play in plays})
    measured = {"tasks": len(plays), "distinct": count}
    if count > 1:
        return Line("tasks", Result.OK, f"{count} of {len(plays)} are distinct", measured)
    return Line(
        "tasks",
        Result.WARN,
        f"{len(plays)} tasks are all the same: reset seems to use neither the seed nor the "
        "keywords of env.tasks",
        measured,
    )
