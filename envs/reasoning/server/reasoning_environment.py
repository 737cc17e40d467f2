"""The OpenEnv environment of reasoning-gym's questions; `tasks` chooses and scores them."""

from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..models import ReasoningAction, ReasoningObservation
from ..tasks import (
    DEFAULT_SIZE,
    DEFAULT_TASK,
    SPLIT_SEEDS,
    Question,
    TaskError,
    choose_question,
    require_split,
)


class ReasoningEnvironment(Environment[ReasoningAction, ReasoningObservation, State]):
    """Asks one question at a time; `reset` asks the next.

    It has no asynchronous methods, because some generators and scorers take long: OpenEnv runs
    synchronous methods in one thread per session, where they do not block other sessions.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._question: Question | None = None  # None before the first reset and after the answer.
        self._task = ""
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        task: str = DEFAULT_TASK,
        split: str = "train",
        index: int | None = None,
        size: int = DEFAULT_SIZE,
        config: dict[str, Any] | None = None,
        holdout: float = 0.0,
    ) -> ReasoningObservation:
        """Ask a question of a task, given by `index`, else by `seed`, else random.

        Raises TaskError (a ValueError) for a task, split, index, seed, size, config or holdout that
        does not exist; the question in progress then stays.
        """
        self._question = choose_question(task, split, index, seed, size, config, holdout)
        self._task = task
        self._state = State(episode_id=episode_id or str(uuid4()))
        return ReasoningObservation(task=task, question=self._question.text)

    def step(
        self, action: ReasoningAction, timeout_s: float | None = None, **_: Any
    ) -> ReasoningObservation:
        """Score the answer with the library's scorer, from 0.0 to 1.0. There is one try.

        Before the first `reset` and after the answer, it returns `done`, a message and no reward.
        """
        if self._question is None:
            message = "There is no question. Reset to be asked one."
            return ReasoningObservation(message=message, reward=0.0, done=True)
        score, text = self._question.score(action.answer), self._question.text
        self._question = None
        self._state.step_count += 1
        message = f"Your answer scored {score:.2f} of 1.00."
        return ReasoningObservation(
            task=self._task, question=text, message=message, reward=score, done=True
        )

    @property
    def state(self) -> State:
        """Return the episode's id and the number of answers given; never the right one."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="reasoning",
            description="The questions and scorers of reasoning-gym",
            version="0.1.0",
        )

    def list_splits(self) -> list[dict[str, Any]]:
        """List the splits with their default numbers of questions, which hold for any task."""
        return [
            {
                "name": split,
                "type": "train" if split == "train" else "validation",
                "num_tasks": DEFAULT_SIZE,
            }
            for split in SPLIT_SEEDS
        ]

    def num_tasks(self, split: str) -> int:
        """Return the default number of questions of a split."""
        require_split(split)
        return DEFAULT_SIZE

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the reset keywords of one question of the default task. Raises TaskError."""
        if not 0 <= index < self.num_tasks(split):
            raise TaskError(f"split {split!r} has {DEFAULT_SIZE} tasks, got index {index}")
        return {"split": split, "index": index}

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the reset keywords of the questions `start:stop`."""
        indices = range(self.num_tasks(split))[start:stop]
        return [{"split": split, "index": index} for index in indices]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the reset keywords of all questions of the split, for the default task."""
        return self.get_task_range(split)
