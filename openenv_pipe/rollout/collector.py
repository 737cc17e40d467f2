"""Many episodes at once: one asyncio task per playing episode, in a fixed order of starts."""

import asyncio
import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.environments.adapters.base import Adapter
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.rollout.episode import Chat, Player
from openenv_pipe.types import Episode, Group, Task


class Collector:
    """Plays groups of episodes on one host with one engine."""

    def __init__(
        self, *, env: EnvConfig, host: Host, adapter: Adapter, chat: Chat, engine: Engine
    ) -> None:
        self._env = env
        self._host = host
        self._adapter = adapter
        self._chat = chat
        self._engine = engine

    async def collect(
        self, tasks: Sequence[Task], *, group_size: int, temperature: float, seed: int, label: str
    ) -> list[Group]:
        """`group_size` episodes of each task; groups in the order of the tasks.

        An episode's sampling seed is a hash of (seed, label, place of its group, member), so
        members differ, equal calls are equal, and `label` (a step, say) sets calls apart.
        """
        groups = [
            Group(
                id=f"{label}/{place}",
                task=task,
                episodes=[
                    Episode(
                        task=task,
                        member=member,
                        seed=episode_seed(seed, label, place, member),
                    )
                    for member in range(group_size)
                ],
            )
            for place, task in enumerate(tasks)
        ]
        episodes = [
            (episode, group_seed(seed, label, place))
            for place, group in enumerate(groups)
            for episode in group.episodes
        ]
        await self._play_all(episodes, temperature)
        return groups

    async def _play_all(self, episodes: Sequence[tuple[Episode, int]], temperature: float) -> None:
        limit = min(len(episodes), self._host.capacity, self._engine.max_episodes)
        first = self._engine.expect(len(episodes), limit)
        queue = iter(enumerate(episodes, start=first))
        try:
            with old_objects_at_rest():
                async with asyncio.TaskGroup() as workers:
                    for _ in range(limit):
                        workers.create_task(self._work(queue, temperature))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _work(
        self, queue: Iterator[tuple[int, tuple[Episode, int]]], temperature: float
    ) -> None:
        for number, (episode, seed_of_group) in queue:
            player = Player(
                episode,
                number,
                env=self._env,
                host=self._host,
                adapter=self._adapter,
                chat=self._chat,
                engine=self._engine,
                temperature=temperature,
                group_seed=seed_of_group,
            )
            await player.play()
            self._engine.finish(number)  # not after an error: the whole collection ends with it


@contextmanager
def old_objects_at_rest() -> Iterator[None]:
    """Garbage is looked for among new objects only.

    Episodes make so many of them that all others, of torch alone hundreds of thousands, would be
    looked through again and again: a tenth of a collection's time.
    """
    if gc.get_freeze_count():  # the program keeps objects out itself: its choice stays
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def episode_seed(seed: int, label: str, group: int, member: int) -> int:
    """A seed below 2**63 for one episode."""
    digest = hashlib.sha256(f"{seed}/{label}/{group}/{member}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def group_seed(seed: int, label: str, group: int) -> int:
    """A seed below 2**62 for what the members of a group are asked together."""
    digest = hashlib.sha256(f"{seed}/{label}/{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
