"""The environment's side of a program: its session, whose steps the program takes over HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.adapters.base import Adapter
from openenv_pipe.environments.client.protocol import StepResult, is_mistake
from openenv_pipe.environments.client.session import Session
from openenv_pipe.errors import SessionError, StepRejectedError
from openenv_pipe.types import Opening, Step


class RejectedStepError(Exception):
    """A step that was not taken. The text goes to the program."""


class EnvironmentSteps:
    """Takes the steps of one episode's program in the session of the run, and records them."""

    def __init__(
        self,
        session: Session,
        env: EnvConfig,
        first: StepResult,
        *,
        opening: Opening,
        adapter: Adapter,
        last_call: Callable[[], int],
    ) -> None:
        """
        first: the result of the reset.
        opening, adapter: describe the environment's tools and actions.
        last_call: returns the number of the last model call, which a step is credited to.
        """
        self.first = first
        self.opening = opening
        self.adapter = adapter
        self.taken: list[tuple[int, Step, float]] = []  # the last call before, the step, Unix time
        self.rejected: dict[int, str] = {}  # why the last step after a call was rejected, by call
        self.is_done = first.done
        self.is_used_up = False  # the program asked for more steps than env.max_turns
        self.failure: SessionError | None = None  # what ends the episode
        self.num_running = 0  # requests that the session has not answered
        self._session = session
        self._env = env
        self._last_call = last_call
        self._one_at_a_time = asyncio.Lock()
        self.has_ended = asyncio.Event()  # no further step is taken

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        call = self._last_call()
        async with self._taken_alone():
            try:
                result = await self._session.step(action, self._env.step_timeout_s)
            except SessionError as error:
                if isinstance(error, StepRejectedError) and is_mistake(error, self._env):
                    self.rejected[call] = str(error)
                else:
                    self.failure = error
                raise RejectedStepError(str(error)) from error
            step = Step(action=action, observation=result.observation, reward=result.reward or 0.0)
            self.taken.append((call, step, time.time()))
            self.is_done = result.done
            return result

    def report(self, reward: float | None, metrics: Mapping[str, float]) -> None:
        """Record what a client reports at its end, as a last step."""
        reported = {"reported": {"reward": reward, "metrics": dict(metrics)}}
        step = Step(action={}, observation=reported, reward=reward or 0.0)
        self.taken.append((self._last_call(), step, time.time()))

    async def state(self) -> dict[str, Any]:
        async with self._taken_alone():
            try:
                return await self._session.state(self._env.step_timeout_s)
            except SessionError as error:
                if not isinstance(error, StepRejectedError):
                    self.failure = error
                raise RejectedStepError(str(error)) from error

    async def end(self) -> None:
        """Take no further step, and wait for the one under way."""
        self.has_ended.set()
        async with self._one_at_a_time:
            return

    @asynccontextmanager
    async def _taken_alone(self) -> AsyncIterator[None]:
        self.num_running += 1
        try:
            async with self._one_at_a_time:
                self._reject_late()
                yield
        finally:
            self.num_running -= 1

    def _reject_late(self) -> None:
        if self.is_done or self.has_ended.is_set() or self.failure is not None:
            raise RejectedStepError("the episode is over")
        if len(self.taken) >= self._env.max_turns:
            self.is_used_up = True
            raise RejectedStepError(f"all env.max_turns={self._env.max_turns} steps are taken")
