"""The OpenEnv environment of questions whose rows come with the reset; `scoring` scores them."""

from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..models import QuestionsAction, QuestionsObservation
from ..scoring import Score, asked


class QuestionsEnvironment(Environment[QuestionsAction, QuestionsObservation, State]):
    """Asks the question that `reset` is given, and scores one answer.

    It has no asynchronous methods, because scoring may take long: OpenEnv runs synchronous methods
    in one thread per session, where they do not block other sessions.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, score: Score) -> None:
        super().__init__()
        self._score = score
        self._row: dict[str, Any] | None = None  # None before the first reset and after the answer
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **row: Any
    ) -> QuestionsObservation:
        """Ask the `question` of a row, which has its `answer` and what else the scoring reads.

        Raises RowError (a ValueError) for a row that cannot be asked or scored; the question in
        progress then stays.
        """
        question = asked(row)
        self._score.check(row)
        self._row = row
        self._state = State(episode_id=episode_id or str(uuid4()))
        return QuestionsObservation(question=question)

    def step(
        self, action: QuestionsAction, timeout_s: float | None = None, **_: Any
    ) -> QuestionsObservation:
        """Score the answer. There is one try.

        Before the first `reset` and after the answer, it returns `done`, a message and no reward.
        Raises ScoreError if a function of yours fails.
        """
        if self._row is None:
            message = "There is no question. Reset to be asked one."
            return QuestionsObservation(message=message, reward=0.0, done=True)
        row, self._row = self._row, None
        reward = self._score(action.answer, row)
        self._state.step_count += 1
        message = f"Your answer scored {reward:.2f}."
        return QuestionsObservation(question=asked(row), message=message, reward=reward, done=True)

    @property
    def state(self) -> State:
        """Return the episode's id and the number of answers given; never the right one."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="questions",
            description="A data set of questions and answers",
            version="0.1.0",
        )
