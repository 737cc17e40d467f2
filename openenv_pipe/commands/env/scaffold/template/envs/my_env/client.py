"""A typed client on OpenEnv's own: for notebooks and scripts."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import MyEnvAction, MyEnvObservation


class MyEnv(EnvClient[MyEnvAction, MyEnvObservation, State]):
    """One episode at a time over one WebSocket.

    >>> with MyEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     letter = env.reset(seed=7).observation.letter
    ...     result = env.step(MyEnvAction(answer="1"))
    """

    def _step_payload(self, action: MyEnvAction) -> dict[str, Any]:
        return {"answer": action.answer}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[MyEnvObservation]:
        reward, done = payload["reward"], payload["done"]
        observation = MyEnvObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
