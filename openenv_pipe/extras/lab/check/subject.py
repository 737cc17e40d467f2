"""The environment under test: one running server, its sessions, and the policies that play it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.pool import open_session
from openenv_pipe.environments.tasks import TaskSet
from openenv_pipe.errors import raise_first
from openenv_pipe.extras.lab.episodes import Chooser, play_to_end
from openenv_pipe.extras.lab.targets import open_when_free
from openenv_pipe.types import Task

Work = TypeVar("Work")

NUM_SESSIONS = 8  # that play at once, if the server allows as many
EXPERTS = ("expert", "perfect")  # names of baselines that know what to do


@dataclass(kw_only=True)
class EnvironmentUnderTest:
    """A running server, its tasks, and the policies that choose actions for the probes."""

    env: EnvConfig
    host: Host  # one server; probes open sessions beside its pool
    tasks: TaskSet  # of the train split
    eval_tasks: TaskSet
    choosers: dict[str, Chooser]  # "random", and "scripted" if there is a policy
    read_policy: Callable[[str], Awaitable[Chooser]]  # the chooser of module:name
    is_experiment: bool  # True for an experiment's environment, which training will use
    num_declared: int  # sessions per server in the configuration
    num_episodes: int  # for the memory probe
    notify: Callable[[str], None]  # receives progress messages
    unusable_reward: float = 0.0  # of one unusable reply
    is_lost: bool = False  # the server has stopped answering
    num_sessions: int = 1  # that the server really allows; set by the session probe
    # of different tasks with the actions of the best episode; set by the probe of rewards
    repeated: list[PlayedEpisode] = field(default_factory=list)

    @property
    def best(self) -> Chooser:
        """The scripted policy if there is one, because it gets further."""
        return self.choosers.get("scripted", self.choosers["random"])

    async def expert(self) -> tuple[str, Chooser] | None:
        """Return the name and the chooser of the scripted policy, or of an expert among baselines.

        None if there is neither. Raises ConfigError: the policy cannot be read.
        """
        if "scripted" in self.choosers:
            return "the scripted policy", self.choosers["scripted"]
        for name in EXPERTS:
            if name in self.env.baselines:
                chooser = await self.read_policy(self.env.baselines[name])
                return f"env.baselines.{name}", chooser
        return None

    def task(self, index: int) -> Task:
        """Return a task of the train split; indices wrap around at its end."""
        return self.tasks[index % len(self.tasks)]

    async def open(self) -> Session:
        return await open_session(self.env, self.host.urls[0], self.host.access)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Open a session and close it at the end. Waits briefly for a slot. Raises SessionError."""
        session = await open_when_free(self.env, self.host)
        try:
            yield session
        finally:
            await session.close()

    async def play(
        self,
        session: Session,
        index: int,
        chooser: Chooser,
        *,
        member: int = 0,
        with_states: bool = False,
    ) -> PlayedEpisode:
        """Play a task; equal arguments choose equal actions. Raises SessionError."""
        draw = random.Random(f"{index}/{member}")
        play = PlayedEpisode(task=self.task(index))
        await play_to_end(session, play, chooser, self.env, draw, with_states=with_states)
        return play

    async def play_alike(self, tasks: Sequence[Task], chooser: Chooser) -> list[PlayedEpisode]:
        """Play tasks in one session with a chooser that draws the same numbers in each task.

        Raises SessionError.
        """
        async with self.session() as session:
            return [await self.play_task(session, task, chooser) for task in tasks]

    async def play_task(self, session: Session, task: Task, chooser: Chooser) -> PlayedEpisode:
        """Play one task. The chooser's random numbers are the same for every task.

        Raises SessionError.
        """
        play = PlayedEpisode(task=task)
        await play_to_end(session, play, chooser, self.env, random.Random(0))
        return play

    async def spread(
        self,
        work: Iterable[Work],
        do: Callable[[Session, Work], Awaitable[None]],
        *,
        limit_s: float,
        num_sessions: int = NUM_SESSIONS,
    ) -> float:
        """Do the work in concurrent sessions; return the seconds that it took.

        After `limit_s` no new work is started. num_sessions: at most, as far as the server allows.

        Raises SessionError.
        """
        queue = iter(work)

        async def worker(session: Session) -> None:
            for item in queue:
                await do(session, item)
                if time.monotonic() > deadline:
                    return

        sessions: list[Session] = []
        try:
            for _ in range(min(num_sessions, self.num_sessions)):
                sessions.append(await open_when_free(self.env, self.host))
            started_s = time.monotonic()
            deadline = started_s + limit_s
            async with asyncio.TaskGroup() as workers:
                for session in sessions:
                    workers.create_task(worker(session))
            return time.monotonic() - started_s
        except BaseExceptionGroup as errors:
            raise_first(errors)
        finally:
            await asyncio.gather(*(session.close() for session in sessions))
