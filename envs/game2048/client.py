"""A typed OpenEnv client for notebooks and scripts."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import Game2048Action, Game2048Observation


class Game2048Env(EnvClient[Game2048Action, Game2048Observation, State]):
    """Plays one game at a time over one WebSocket.

    >>> with Game2048Env(base_url="http://127.0.0.1:8000").sync() as env:
    ...     result = env.reset(split="train", index=0)
    ...     result = env.step(Game2048Action(action="left"))
    ...     print(result.observation.grid)
    """

    def _step_payload(self, action: Game2048Action) -> dict[str, Any]:
        return {"action": action.action}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Game2048Observation]:
        reward, done = payload["reward"], payload["done"]
        observation = Game2048Observation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
