"""A typed OpenEnv client for notebooks and scripts."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import CodingAction, CodingObservation


class CodingEnv(EnvClient[CodingAction, CodingObservation, State]):
    """Plays one episode at a time over one WebSocket.

    >>> with CodingEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     result = env.reset(split="train", index=0)
    ...     print(result.observation.statement)
    ...     result = env.step(CodingAction(code=result.observation.signature + " return 0"))
    ...     print(result.observation.feedback)
    """

    def _step_payload(self, action: CodingAction) -> dict[str, Any]:
        return {"code": action.code}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[CodingObservation]:
        reward, done = payload["reward"], payload["done"]
        observation = CodingObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
