"""The environment, and the server's ASGI application."""

import os
import random
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

NUM_TURNS = 3


class Answer(Action):
    """The reply, of any text."""

    answer: str


class Number(Observation):
    """The number whose successor is asked for."""

    number: int = 0


class CountingEnvironment(Environment[Answer, Number, State]):
    """One episode at a time. Rewards sum to 1.0 if all answers are right."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._draw = random.Random()
        self._number = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Number:
        """Start anew; the seed decides all numbers."""
        self._draw = random.Random(seed)
        self._state = State(episode_id=episode_id, step_count=0)
        return self._next_number(reward=None)

    def step(self, action: Answer, timeout_s: float | None = None, **_: Any) -> Number:
        """Score the answer and show another number."""
        self._state.step_count += 1
        is_right = action.answer == str(self._number + 1)
        return self._next_number(reward=is_right / NUM_TURNS)

    @property
    def state(self) -> State:
        return self._state

    def _next_number(self, reward: float | None) -> Number:
        self._number = self._draw.randrange(100)
        is_done = self._state.step_count >= NUM_TURNS
        return Number(number=self._number, reward=reward, done=is_done)


app = create_app(
    CountingEnvironment,
    Answer,
    Number,
    env_name="counting",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "256")),
)
