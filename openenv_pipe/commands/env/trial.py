"""Try an environment before its block is written: sessions, first observations, random episodes."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import fmean

from openenv_pipe.commands.env.episodes import (
    Chooser,
    PlayedEpisode,
    play_to_end,
    start_episode,
)
from openenv_pipe.commands.env.random_play import random_actions, session_tools
from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.pool import open_session
from openenv_pipe.environments.schemas import Schema
from openenv_pipe.environments.tasks import TaskSet
from openenv_pipe.errors import ServerFullError, SessionError, StepRefusedError
from openenv_pipe.types import Observation, Task, Tool

NUM_SESSIONS = 32  # opened at once: more are not needed by the experiment that `inspect` writes
NUM_TASKS = 4
NUM_PLAYS = 12
PLAY_LIMIT_S = 30.0  # no episode is begun after it
SLOT_LIMIT_S = 2.0  # for a server to free the slot of a closed session
SLOT_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What was seen of an environment that random actions played."""

    num_sessions: int  # that the server allows at once, up to NUM_SESSIONS
    tools: Sequence[Tool]  # of an MCP environment
    firsts: Sequence[Observation]  # the first observation of each of the first tasks
    plays: Sequence[PlayedEpisode]  # at least one
    failure: SessionError | None = None  # that ended the last episode, such as a timeout

    @property
    def exceptions(self) -> list[StepRefusedError]:
        """Steps that raised on the server."""
        refusals = [refusal for play in self.plays for refusal in play.refusals]
        return [refusal for refusal in refusals if refusal.code == "EXECUTION_ERROR"]

    @property
    def num_actions(self) -> int:
        """The number of actions that the environment took."""
        return sum(len(play.actions) for play in self.plays)

    @property
    def are_tasks_alike(self) -> bool:
        """True if the first observations of different tasks are the same."""
        return all(_shown(first) == _shown(self.firsts[0]) for first in self.firsts)

    @property
    def is_done_at_once(self) -> bool:
        """True if no episode can be played, because every reset is done."""
        return all(play.done and not play.actions for play in self.plays)

    @property
    def mean_reward(self) -> float:
        """The mean reward of an episode of random actions."""
        return fmean(play.reward for play in self.plays)

    @property
    def mean_step_s(self) -> float:
        """The mean duration of a step in seconds; that of a reset if no step was answered."""
        steps_s = [each for play in self.plays for each in play.durations_s[1:]]
        return fmean(steps_s or [play.durations_s[0] for play in self.plays])


async def try_environment(env: EnvConfig, host: Host, tasks: TaskSet, action: Schema) -> Trial:
    """Play the first tasks with random actions, each episode in the same session.

    Raises:
        SessionError: No session can be opened, or no task can be reset.
    """
    lenient = env.model_copy(update={"step_exception": "unusable"})
    num_sessions = await count_sessions(env, host)
    tools = await session_tools(env, host, tasks[0], action)
    plays: list[PlayedEpisode] = []
    failure = None
    session = await _open_when_free(env, host)
    try:
        failure = await _play(session, lenient, tasks, random_actions(action, tools), plays)
    finally:
        await session.close()
    return Trial(
        num_sessions=num_sessions,
        tools=tools,
        firsts=[play.observations[0] for play in plays[: min(NUM_TASKS, len(tasks))]],
        plays=plays,
        failure=failure,
    )


async def _play(
    session: Session, env: EnvConfig, tasks: TaskSet, choose: Chooser, plays: list[PlayedEpisode]
) -> SessionError | None:
    """Add episodes to `plays`; return the error that ended the last, if it had been reset.

    Raises:
        SessionError: The first task cannot be reset.
    """
    latest_s = time.monotonic() + PLAY_LIMIT_S
    for number in range(NUM_PLAYS):
        task: Task = tasks[number % min(NUM_TASKS, len(tasks))]
        if plays and time.monotonic() > latest_s:
            return None
        try:
            play = await start_episode(session, task, env)
            plays.append(play)
            await play_to_end(session, play, choose, env, random.Random(number))
        except SessionError as error:
            if not plays:
                raise
            return error
    return None


async def count_sessions(env: EnvConfig, host: Host) -> int:
    """Return how many sessions the server allows at once, up to NUM_SESSIONS.

    Other failures than that of a full server are not reported here: playing meets them again.
    """
    async with AsyncExitStack() as opened:
        for number in range(NUM_SESSIONS):
            try:
                session = await (
                    open_session(env, host.urls[0], host.access)
                    if number
                    else _open_when_free(env, host)
                )
            except SessionError:
                return max(1, number)
            opened.push_async_callback(session.close)
    return NUM_SESSIONS


async def _open_when_free(env: EnvConfig, host: Host) -> Session:
    """Open a session; the slot of one that was just closed may still be taken for a moment."""
    latest_s = time.monotonic() + SLOT_LIMIT_S
    while True:
        try:
            return await open_session(env, host.urls[0], host.access)
        except ServerFullError:
            if time.monotonic() > latest_s:
                raise
        await asyncio.sleep(SLOT_POLL_S)


def _shown(observation: Observation) -> dict[str, object]:
    return {key: value for key, value in observation.items() if key != "metadata"}
