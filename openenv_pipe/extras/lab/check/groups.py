"""Play groups of episodes as training does, and check their rewards and look for leaks."""

import random
from collections.abc import AsyncIterator, Sequence
from itertools import product

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.client.session import Session
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.check.leaks import EXPERT_NAME, expert_line, leak_lines
from openenv_pipe.extras.lab.check.rewards import (
    Groups,
    best_play,
    constant_line,
    ends_line,
    reward_lines,
    silence_line,
)
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.types import Action, Observation

NUM_TASKS = 16
GROUP_SIZE = 6
LIMIT_S = 30.0  # for each policy


async def probe_groups(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Check whether rewards within groups differ, and whether answers leak before the end."""
    groups: Groups = {name: await _groups(subject, name) for name in subject.choosers}
    for line in reward_lines(groups, subject.env.success_reward):
        yield line
    silence = subject.env.max_turns * subject.unusable_reward
    if (compared := silence_line(groups["random"], silence)) is not None:
        yield compared
    plays = [play for each in groups.values() for group in each for play in group]
    if (ends := ends_line(plays, subject.env.max_turns)) is not None:
        yield ends
    if (best := best_play(groups, subject.env.success_reward)) is not None:
        subject.repeated = await _repeated(subject, best)
        yield constant_line(best, subject.repeated)
    try:
        expert = await expert_line(subject, groups["random"])
    except ConfigError as error:
        text = f"not searched for, because the expert cannot be played: {error}"
        expert = Line(EXPERT_NAME, Result.WARN, text)
    for line in leak_lines(plays, expert):
        yield line


async def _repeated(subject: EnvironmentUnderTest, best: PlayedEpisode) -> list[PlayedEpisode]:
    """Play the first tasks with the actions of one episode, whatever the observations are."""
    plays: list[PlayedEpisode] = []

    async def do(session: Session, index: int) -> None:
        actions = iter(best.actions)

        def choose(observations: Sequence[Observation], draw: random.Random) -> Sequence[Action]:
            return [action for action in [next(actions, None)] if action is not None]

        plays.append(await subject.play(session, index, choose))

    await subject.spread(range(min(NUM_TASKS, len(subject.tasks))), do, limit_s=LIMIT_S)
    return plays


async def _groups(subject: EnvironmentUnderTest, name: str) -> list[list[PlayedEpisode]]:
    num_tasks = min(NUM_TASKS, len(subject.tasks))
    groups: list[list[PlayedEpisode]] = [[] for _ in range(num_tasks)]

    async def do(session: Session, place: tuple[int, int]) -> None:
        index, member = place
        chooser = subject.choosers[name]
        play = await subject.play(session, index, chooser, member=member, with_states=True)
        groups[index].append(play)

    await subject.spread(product(range(num_tasks), range(GROUP_SIZE)), do, limit_s=LIMIT_S)
    return [group for group in groups if len(group) == GROUP_SIZE]
