"""A typed OpenEnv client for notebooks and scripts."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import QuestionsAction, QuestionsObservation


class QuestionsEnv(EnvClient[QuestionsAction, QuestionsObservation, State]):
    """Answers one question at a time over one WebSocket.

    >>> with QuestionsEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     result = env.reset(question="1 + 1?", answer="2")
    ...     result = env.step(QuestionsAction(answer="2"))
    ...     print(result.reward)
    """

    def _step_payload(self, action: QuestionsAction) -> dict[str, Any]:
        return {"answer": action.answer}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[QuestionsObservation]:
        reward, done = payload["reward"], payload["done"]
        observation = QuestionsObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
