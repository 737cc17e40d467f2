"""Groups of episodes, played as training plays them; rewards and leaks are read from them."""

from collections.abc import AsyncIterator, Mapping, Sequence

from openenv_pipe.commands.env.check.leaks import leak_lines
from openenv_pipe.commands.env.check.rewards import reward_lines
from openenv_pipe.commands.env.check.subject import EnvironmentUnderTest
from openenv_pipe.commands.env.episodes import Play
from openenv_pipe.commands.findings import Line
from openenv_pipe.environments.client.session import Session

NUM_TASKS = 16
GROUP_SIZE = 6
NUM_SESSIONS = 8
LIMIT_S = 30.0  # of each policy

Groups = Mapping[str, Sequence[Sequence[Play]]]  # by policy; each group has one task


async def probe_played(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """What the rewards of groups teach, and whether what is told at the end was told before."""
    groups: Groups = {name: await _groups(subject, name) for name in subject.choosers}
    for line in reward_lines(groups, subject.env.success_reward):
        yield line
    for line in leak_lines([play for each in groups.values() for group in each for play in group]):
        yield line


async def _groups(subject: EnvironmentUnderTest, name: str) -> list[list[Play]]:
    """Full groups only: those that the time limit cut short are left out."""
    num_tasks = min(NUM_TASKS, len(subject.tasks))
    groups: list[list[Play]] = [[] for _ in range(num_tasks)]

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
