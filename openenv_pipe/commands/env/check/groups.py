"""Play groups of episodes as training does, and check their rewards and leaks."""

from collections.abc import AsyncIterator, Mapping, Sequence

from openenv_pipe.commands.env.check.leaks import leak_lines
from openenv_pipe.commands.env.check.rewards import reward_lines, silence_line
from openenv_pipe.commands.env.check.subject import EnvironmentUnderTest
from openenv_pipe.commands.env.episodes import PlayedEpisode
from openenv_pipe.commands.findings import Line
from openenv_pipe.environments.client.session import Session

NUM_TASKS = 16
GROUP_SIZE = 6
NUM_SESSIONS = 8
LIMIT_S = 30.0  # for each policy

Groups = Mapping[str, Sequence[Sequence[PlayedEpisode]]]  # by policy; a group has one task


async def probe_groups(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Check whether rewards within groups differ, and whether answers leak before the end."""
    groups: Groups = {name: await _groups(subject, name) for name in subject.choosers}
    for line in reward_lines(groups, subject.env.success_reward):
        yield line
    silence = subject.env.max_turns * subject.unusable_reward
    if (compared := silence_line(groups["random"], silence)) is not None:
        yield compared
    for line in leak_lines([play for each in groups.values() for group in each for play in group]):
        yield line


async def _groups(subject: EnvironmentUnderTest, name: str) -> list[list[PlayedEpisode]]:
    """Play groups; those that the time limit cut short are left out."""
    num_tasks = min(NUM_TASKS, len(subject.tasks))
    groups: list[list[PlayedEpisode]] = [[] for _ in range(num_tasks)]

    async def do(session: Session, place: tuple[int, int]) -> None:
        index, member = place
        chooser = subject.choosers[name]
        play = await subject.play(session, index, chooser, member=member, with_states=True)
        groups[index].append(play)

    await subject.spread(
        [(index, member) for index in range(num_tasks) for member in range(GROUP_SIZE)],
        do,
        num_sessions=min(NUM_SESSIONS, subject.num_sessions),
        limit_s=LIMIT_S,
    )
    return [group for group in groups if len(group) == GROUP_SIZE]
