"""A typed OpenEnv client for notebooks and scripts."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import ReasoningAction, ReasoningObservation


class ReasoningEnv(EnvClient[ReasoningAction, ReasoningObservation, State]):
    """Answers one question at a time over one WebSocket.

    >>> with ReasoningEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     result = env.reset(split="train", task="coin_flip")
    ...     result = env.step(ReasoningAction(answer="heads"))
    ...     print(result.reward)
    """

    def _step_payload(self, action: ReasoningAction) -> dict[str, Any]:
        return {"answer": action.answer}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[ReasoningObservation]:
        reward, done = payload["reward"], payload["done"]
        observation = ReasoningObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
