"""A typed OpenEnv client for notebooks and scripts."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import CatchAction, CatchObservation


class CatchEnv(EnvClient[CatchAction, CatchObservation, State]):
    """Plays one game at a time over one WebSocket.

    >>> with CatchEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     result = env.reset(split="train", index=0)
    ...     result = env.step(CatchAction(action="left"))
    ...     print(result.observation.grid)
    """

    def _step_payload(self, action: CatchAction) -> dict[str, Any]:
        return {"action": action.action}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[CatchObservation]:
        reward, done = payload["reward"], payload["done"]
        observation = CatchObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
