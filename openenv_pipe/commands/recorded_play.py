"""Play episodes without a model, and record the server's answers.

Episodes are played by the loop of training (`rollout.episode`), but replies are not tokenized, and
token limits do not apply.
"""

import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.engines.scripted import ScriptedEngine, ScriptedPolicy
from openenv_pipe.environments.adapters import Adapter, UnusableReply
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.client.session import EpisodeSession
from openenv_pipe.errors import ConfigError, StepRejectedError
from openenv_pipe.rollout.context import EpisodeSpec
from openenv_pipe.rollout.episode import Player
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import Action, Observation, Opening, Status, Task


@dataclass(kw_only=True, slots=True)
class PlayedEpisode:
    """One episode: the answers to the reset and to each action that was not rejected."""

    task: Task
    results: list[StepResult] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)  # without rejected ones
    rejections: list[StepRejectedError] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)  # one per result
    states: list[dict[str, Any]] = field(default_factory=list)  # before each turn, if requested
    # The rejection that ended the episode; in `rejections` too.
    failure: StepRejectedError | None = None

    @property
    def observations(self) -> list[Observation]:
        return [result.observation for result in self.results]

    @property
    def reward(self) -> float:
        """The sum over all actions: as in training, a reward of the reset does not count."""
        return sum(result.reward or 0.0 for result in self.results[1:])

    @property
    def num_turns(self) -> int:
        """The number of actions that the server was asked to take."""
        return len(self.actions) + len(self.rejections)

    @property
    def done(self) -> bool:
        return self.results[-1].done

    @property
    def comparable(self) -> list[tuple[Any, ...]]:
        """The answers without what may differ between two episodes of the same task."""
        return [comparable(result) for result in self.results]


def comparable(result: StepResult) -> tuple[Any, ...]:
    """Return an answer without its metadata, which may contain times and ids."""
    seen = {key: value for key, value in result.observation.items() if key != "metadata"}
    return seen, result.reward, result.done


class UsableReplies:
    """An adapter whose `read` raises ConfigError for an unusable reply of a scripted policy."""

    def __init__(self, adapter: Adapter) -> None:
        self.open, self.follow, self.reject = adapter.open, adapter.follow, adapter.reject
        self._adapter = adapter

    async def read(self, reply: str) -> Sequence[Action]:
        try:
            return await awaited(self._adapter.read(reply))
        except UnusableReply as unusable:
            raise ConfigError(f"the scripted policy's reply is unusable: {unusable}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class UntokenizedContext:
    """A `rollout.context.PlayContext` without a model, in which token limits do not apply."""

    env: EnvConfig
    engine: Engine
    chat: None = None


class RecordedPlayer(Player):
    """Plays an episode by the loop of training, and keeps the server's answers as they are."""

    def __init__(
        self, env: EnvConfig, engine: Engine, adapter: Adapter, play: PlayedEpisode
    ) -> None:
        unlimited = {
            "max_episode_tokens": sys.maxsize,
            "max_reply_tokens": sys.maxsize,
            "max_observation_tokens": None,
        }
        context = UntokenizedContext(env=env.model_copy(update=unlimited), engine=engine)
        spec = EpisodeSpec(task=play.task, seed=0, temperature=0.0, number=0)
        super().__init__(context, adapter, spec)
        self._record = play

    async def play_in(self, session: EpisodeSession) -> Status:
        """See `Player.play_in`. A rejected step that fails the episode is recorded, not raised."""
        try:
            return await super().play_in(session)
        except StepRejectedError:
            if self._record.failure is None:
                raise
            return Status.ERROR

    async def _reset(self, session: EpisodeSession) -> StepResult:
        return await self._recorded(super()._reset(session))

    async def _step(self, session: EpisodeSession, action: Action) -> StepResult:
        try:
            result = await self._recorded(super()._step(session, action))
        except UnusableReply as mistake:
            assert isinstance(mistake.__cause__, StepRejectedError)
            self._record.rejections.append(mistake.__cause__)
            raise
        except StepRejectedError as rejection:
            self._record.rejections.append(rejection)
            self._record.failure = rejection
            raise
        self._record.actions.append(action)
        return result

    async def _recorded(self, answer: Awaitable[StepResult]) -> StepResult:
        started_s = time.perf_counter()
        result = await answer
        self._record.durations_s.append(time.perf_counter() - started_s)
        self._record.results.append(result)
        return result


async def play_scripted(
    session: EpisodeSession,
    play: PlayedEpisode,
    policy: ScriptedPolicy,
    adapter: Adapter,
    env: EnvConfig,
) -> Opening | None:
    """Play an episode by a scripted policy, as a warm start does, and record it in `play`.

    Returns the opening; None if the episode is done at its reset.

    Raises:
        SessionError: the session failed, or rejected the reset.
        ConfigError: the policy failed, or its reply is unusable.
    """
    player = RecordedPlayer(env, ScriptedEngine(policy), UsableReplies(adapter), play)
    await player.play_in(session)
    return player.opening


async def reset(session: EpisodeSession, task: Task, env: EnvConfig) -> StepResult:
    """Reset the session to a task, as training does. Raises SessionError."""
    return await session.reset({**task.reset, "seed": task.seed}, env.reset_timeout_s)
