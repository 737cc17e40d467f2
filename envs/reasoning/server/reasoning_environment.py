"""reasoning-gym as an OpenEnv environment: arguments in, observations out; no more than that."""

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
    """One question at a time; `reset` asks the next.

    There are no asynchronous methods: some generators and scorers take long, and OpenEnv runs
    the synchronous ones in a thread for each session, where they hold up no other.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._question: Question | None = None  # None before the first reset and once answered.
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
    ) -> ReasoningObservation:
        """Ask a question of a task, given by `index`, else by `seed`, else random.

        Raises TaskError (a ValueError) for a task, split, index, seed, size or config that does
        not exist; the question in progress then stays.
        """
        self._question = choose_question(task, split, index, seed, size, config)
        self._task = task
        self._state = State(episode_id=episode_id or str(uuid4()))
        return ReasoningObservation(task=task, question=self._question.text)

    def step(
        self, action: ReasoningAction, timeout_s: float | None = None, **_: Any
    ) -> ReasoningObservation:
        """Score the answer with the library's scorer, from 0.0 to 1.0. There is one try.

        Before the first `reset` and after the answer: `done`, a message, and no reward.
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
        """The episode's id and the number of answers given; never the right one."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="reasoning",
            description="The questions and scorers of reasoning-gym",
            version="0.1.0",
        )

    def list_splits(self) -> list[dict[str, Any]]:
        """The splits, and how many questions each has by default, of any task."""
        return [
            {
                "name": split,
                "type": "train" if split == "train" else "validation",
                "num_tasks": DEFAULT_SIZE,
            }
            for split in SPLIT_SEEDS
        ]

    def num_tasks(self, split: str) -> int:
        """How many questions the split has by default."""
        require_split(split)
        return DEFAULT_SIZE

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """The reset keywords of one question of the default task; raises TaskError."""
        if not 0 <= index < self.num_tasks(split):
            raise TaskError(f"split {split!r} has {DEFAULT_SIZE} tasks, got index {index}")
        return {"split": split, "index": index}

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """The reset keywords of the questions from `start` to `stop`, as a slice has them."""
        indices = range(self.num_tasks(split))[start:stop]
        return [{"split": split, "index": index} for index in indices]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """The reset keywords of all questions of the split, of the default task."""
        return self.get_task_range(split)
