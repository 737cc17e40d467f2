"""A typed OpenEnv client for notebooks and scripts."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import GymnasiumAction, GymnasiumObservation


class GymnasiumEnv(EnvClient[GymnasiumAction, GymnasiumObservation, State]):
    """Plays one environment over one WebSocket.

    >>> with GymnasiumEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     result = env.reset(seed=0)
    ...     while not result.done:
    ...         result = env.step(GymnasiumAction(action=2))
    ...     print(result.reward)
    """

    def _step_payload(self, action: GymnasiumAction) -> dict[str, Any]:
        return {"action": action.action}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[GymnasiumObservation]:
        reward, done = payload["reward"], payload["done"]
        observation = GymnasiumObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
