"""A typed OpenEnv client for notebooks and scripts."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import WordleAction, WordleObservation


class WordleEnv(EnvClient[WordleAction, WordleObservation, State]):
    """Plays one game at a time over one WebSocket.

    >>> with WordleEnv(base_url="http://127.0.0.1:8000").sync() as env:
    ...     result = env.reset(split="train", index=0)
    ...     result = env.step(WordleAction(guess="about"))
    ...     print(result.observation.marks)
    """

    def _step_payload(self, action: WordleAction) -> dict[str, Any]:
        return {"guess": action.guess}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[WordleObservation]:
        reward, done = payload["reward"], payload["done"]
        observation = WordleObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
