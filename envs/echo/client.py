"""A typed OpenEnv client for notebooks and scripts."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import EchoAction, EchoObservation


class EchoEnv(EnvClient[EchoAction, EchoObservation, State]):
    """Plays one episode at a time over one WebSocket.

    >>> with EchoEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     letter = env.reset(seed=7).observation.letter
    ...     print(env.step(EchoAction(message=letter)).reward)
    1.0
    """

    def _step_payload(self, action: EchoAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[EchoObservation]:
        reward, done = payload["reward"], payload["done"]
        observation = EchoObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
