"""Try an environment before its block is written: sessions, random episodes, and notes on it."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import fmean

from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.adapters.json import without_metadata
from openenv_pipe.environments.adapters.templates import observation_text
from openenv_pipe.environments.client.protocol import EXECUTION_ERROR, is_wrong_return
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.pool import open_session
from openenv_pipe.environments.schemas import Schema
from openenv_pipe.environments.tasks import TaskSet
from openenv_pipe.errors import SessionError, StepRejectedError, raise_first
from openenv_pipe.extras.lab.check.rewards import unusable_penalty
from openenv_pipe.extras.lab.episodes import (
    Chooser,
    is_complaint,
    play_to_end,
    random_actions,
    session_tools,
)
from openenv_pipe.extras.lab.targets import open_when_free
from openenv_pipe.rollout.collector import done_at_reset
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import Action, Observation, Tool

NUM_SESSIONS = 32  # opened at once: more are not needed by the experiment that `inspect` writes
NUM_TASKS = 4
NUM_PLAYS = 12
MAX_TURNS = 64  # of an episode, at least, to see when it ends
PLAY_LIMIT_S = 30.0  # no episode and no turn is begun after it
MAX_SHOWN = 400  # characters of an observation or an error in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    num_sessions: int  # that the server allows at once, up to NUM_SESSIONS
    tools: Sequence[Tool]  # of an MCP environment
    firsts: Sequence[Observation]  # the first observation of each of the first tasks
    plays: Sequence[PlayedEpisode]  # at least one
    failure: SessionError | None = None  # that ended an episode, such as a timeout

    @property
    def rejections(self) -> list[StepRejectedError]:
        return [rejection for play in self.plays for rejection in play.rejections]

    @property
    def exceptions(self) -> list[StepRejectedError]:
        return [rejection for rejection in self.rejections if rejection.code == EXECUTION_ERROR]

    @property
    def endings(self) -> list[int]:
        return [play.num_turns for play in self.plays if play.done and play.num_turns]

    @property
    def num_actions(self) -> int:
        return sum(len(play.actions) for play in self.plays)

    @property
    def are_tasks_alike(self) -> bool:
        """True if the first observations of different tasks are the same."""
        return all(_shown(first) == _shown(self.firsts[0]) for first in self.firsts)

    @property
    def mean_step_s(self) -> float:
        """The mean duration of a step in seconds; that of a reset if no step was answered."""
        steps_s = [each for play in self.plays for each in play.durations_s[1:]]
        return fmean(steps_s or [play.durations_s[0] for play in self.plays])


async def try_environment(
    env: EnvConfig, host: Host, tasks: TaskSet, action: Schema, notify: Callable[[str], None]
) -> Trial:
    """Play the first tasks with random actions, in several sessions at once if there are as many.

    Raises SessionError.
    """
    notify("listing tools")
    tools = await session_tools(env, host, tasks[0], action)
    notify("opening sessions")
    async with AsyncExitStack() as opened:
        sessions = await _open_sessions(env, host, opened)
        for session in sessions[NUM_PLAYS:]:
            await session.close()
        # Longer than a run's episodes, to see when they end; no exception ends an episode.
        lenient = env.model_copy(
            update={"step_exception": "unusable", "max_turns": max(MAX_TURNS, env.max_turns)}
        )
        trial = _RandomPlay(
            env=lenient, tasks=tasks, choose=random_actions(action, tools), notify=notify
        )
        try:
            async with asyncio.TaskGroup() as workers:
                for session in sessions[:NUM_PLAYS]:
                    workers.create_task(trial.play(session))
        except BaseExceptionGroup as errors:
            raise_first(errors)
    if not trial.plays:
        raise trial.failures[0]
    plays = [trial.plays[number] for number in sorted(trial.plays)]
    return Trial(
        num_sessions=len(sessions),
        tools=tools,
        firsts=[play.observations[0] for play in plays[: min(NUM_TASKS, len(tasks))]],
        plays=plays,
        failure=trial.failures[0] if trial.failures else None,
    )


@dataclass(kw_only=True)
class _RandomPlay:
    """Episodes of the first tasks, which sessions take in turn until the time is up."""

    env: EnvConfig
    tasks: TaskSet
    choose: Chooser
    notify: Callable[[str], None]
    plays: dict[int, PlayedEpisode] = field(default_factory=dict)  # by their number
    failures: list[SessionError] = field(default_factory=list)  # one at most for each session

    def __post_init__(self) -> None:
        self._numbers = iter(range(NUM_PLAYS))
        self._latest_s = time.monotonic() + PLAY_LIMIT_S
        self._num_ended = 0

    async def play(self, session: Session) -> None:
        """Play one episode after another, until none is left, the time is over, or one fails."""
        for number in self._numbers:
            if self.plays and time.monotonic() > self._latest_s:
                return
            try:
                await self._play_one(session, number)
            except SessionError as error:
                self.failures.append(error)
                return
            self._num_ended += 1
            self.notify(f"{self._num_ended} of {NUM_PLAYS} random episodes played")

    async def _play_one(self, session: Session, number: int) -> None:
        task = self.tasks[number % min(NUM_TASKS, len(self.tasks))]
        play = PlayedEpisode(task=task)
        turns = itertools.count()

        async def choose(
            observations: Sequence[Observation], draw: random.Random
        ) -> Sequence[Action]:
            """Choose an action; after the first turn, none once the time is up."""
            is_over = next(turns) > 0 and time.monotonic() > self._latest_s
            return () if is_over else await awaited(self.choose(observations, draw))

        try:
            await play_to_end(session, play, choose, self.env, random.Random(number))
        finally:
            if play.results:
                self.plays[number] = play


async def _open_sessions(env: EnvConfig, host: Host, opened: AsyncExitStack) -> list[Session]:
    """Open as many sessions as the server allows at once, up to NUM_SESSIONS, and at least one.

    Failures other than a full server are not reported here, because playing meets them again.

    opened: closes them. Raises SessionError if the first cannot be opened.
    """
    first = await open_when_free(env, host)
    opened.push_async_callback(first.close)
    more = await asyncio.gather(
        *(open_session(env, host.urls[0], host.access) for _ in range(NUM_SESSIONS - 1)),
        return_exceptions=True,
    )
    others = [each for each in more if isinstance(each, Session)]
    for session in others:
        opened.push_async_callback(session.close)
    for error in more:
        if not isinstance(error, Session | SessionError):
            raise error
    return [first, *others]


def _shown(observation: Observation) -> dict[str, object]:
    return {key: value for key, value in observation.items() if key != "metadata"}


def notes_of(trial: Trial, env: EnvConfig) -> Iterator[str]:
    """Say what a user should know, in whole sentences."""
    first = _short(observation_text(trial.firsts[0]))
    if is_complaint(trial.firsts[0]):
        yield (
            f"the first observation reads like a complaint: {first}; reset may need keywords "
            "(env.tasks.train.reset), or the server data or a key (env.variables)"
        )
    else:
        yield f"a task begins with {first}"
    mean_reward = fmean(play.reward for play in trial.plays)
    if mean_reward < 0.0:
        yield (
            f"random actions earn {mean_reward:.3g} an episode of up to "
            f"{max(play.num_turns for play in trial.plays)} turns, and never acting earns 0, so "
            "GRPO would learn not to act; the experiment therefore has the reward term `unusable`, "
            f"which takes {unusable_penalty(trial.plays):g} for each unusable reply"
        )
    if trial.exceptions and (trial.num_actions or env.step_exception == "unusable"):
        yield (
            f"{len(trial.exceptions)} of {trial.num_actions + len(trial.rejections)} random "
            "actions raised on the server, which step_exception: unusable takes as the model's "
            "mistakes: "
            f"{_short(str(trial.exceptions[0]))}"
        )
    steps = [step for play in trial.plays for step in play.results[1:]]
    if trial.num_actions and all(step.reward is None for step in steps):
        yield "no step had a reward (it was always null); the reward has to come from reward.terms"
    if trial.are_tasks_alike and len(trial.firsts) > 1:
        yield (
            f"the first observations of {len(trial.firsts)} tasks are the same: the environment "
            "may ignore the seed, or need keywords (env.tasks.train.reset) that tell tasks apart"
        )
    if trial.failure is not None:
        yield f"a random episode failed: {_short(str(trial.failure))}"


def problem_of(trial: Trial, env: EnvConfig, action: Schema) -> str | None:
    """Return why a model cannot be trained; None if it can."""
    if all(play.done and not play.actions for play in trial.plays):
        return done_at_reset(trial.firsts[0])
    if not trial.tools and not without_metadata(action).get("properties"):
        return (
            "the environment's action has no fields, and the server lists no tools: there is "
            "nothing that a model could choose"
        )
    if trial.num_actions:
        return None
    if trial.failure is not None:
        return f"no step is answered: {_short(str(trial.failure))}"
    rejection = trial.rejections[0]
    how = "all raised on the server"
    advice = ""
    if not trial.exceptions:
        how = "none is valid for the server, although its own schema allows them"
    elif not is_wrong_return(rejection):
        if env.step_exception == "unusable":
            return None  # The user says that such actions are the model's mistakes.
        advice = (
            "; if other actions are legal there, say so by env.step_exception=unusable, and the "
            "model has to find them"
        )
    return f"of {len(trial.rejections)} random actions, {how}: {_short(str(rejection))}{advice}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
