"""My env as an OpenEnv environment; its rules are in modules of their own."""

from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..models import MyEnvAction, MyEnvObservation
from ..rules import SPLITS, TaskError, choose_task, score, tasks


class MyEnvEnvironment(Environment[MyEnvAction, MyEnvObservation, State]):
    """One episode at a time; `reset` starts the next.

    The asynchronous methods are there for speed: OpenEnv runs them on the server's loop, and the
    synchronous ones in a thread for each session. Leave them out if a step takes long.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._task = ""  # a letter for each turn; none before the first reset
        self._turn = 0
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
    ) -> MyEnvObservation:
        """Start the task given by `index`, else by `seed`, else a random one.

        All randomness comes from them, so the members of a group play the same task. Raises
        TaskError (a ValueError) if it does not exist; the episode in progress then continues.
        """
        self._task = choose_task(split, index, seed)
        self._turn = 0
        self._state = State(episode_id=episode_id or str(uuid4()))
        return self._observe(reward=None)

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
    ) -> MyEnvObservation:
        """Run `reset` on the server's loop. OpenEnv reads the keywords from this signature."""
        return self.reset(seed, episode_id, split=split, index=index)

    def step(
        self, action: MyEnvAction, timeout_s: float | None = None, **_: Any
    ) -> MyEnvObservation:
        """Score the answer. The rewards of an episode sum to at most 1.0.

        Before the first `reset` and after the end: `done`, a message, and reward 0.0.
        """
        if self._turn == len(self._task):
            message = "The episode is over, or was never started. Reset to start one."
            return MyEnvObservation(message=message, turn=self._turn, reward=0.0, done=True)
        reward = score(action.answer, self._task[self._turn]) / len(self._task)
        self._turn += 1
        self._state.step_count += 1
        return self._observe(reward)

    async def step_async(
        self, action: MyEnvAction, timeout_s: float | None = None, **_: Any
    ) -> MyEnvObservation:
        """Run `step` on the server's loop."""
        return self.step(action)

    @property
    def state(self) -> State:
        """The episode's id and the number of turns taken; never the answer."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(name="my_env", description="A letter's place", version="0.1.0")

    def list_splits(self) -> list[dict[str, Any]]:
        """List the splits with their numbers of tasks."""
        return [
            {
                "name": split,
                "type": "train" if split == "train" else "validation",
                "num_tasks": len(tasks(split)),
            }
            for split in SPLITS
        ]

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        return len(tasks(split))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the reset keywords of one task. Raises TaskError."""
        if not 0 <= index < len(tasks(split)):
            raise TaskError(f"split {split!r} has {len(tasks(split))} tasks, got index {index}")
        return {"split": split, "index": index}

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the reset keywords of the tasks `start:stop`."""
        indices = range(len(tasks(split)))[start:stop]
        return [{"split": split, "index": index} for index in indices]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the reset keywords of all tasks of the split."""
        return self.get_task_range(split)

    def _observe(self, reward: float | None) -> MyEnvObservation:
        is_done = self._turn == len(self._task)
        return MyEnvObservation(
            letter="" if is_done else self._task[self._turn],
            message="" if is_done else "Which letter of the alphabet is it?",
            turn=self._turn,
            turns_left=len(self._task) - self._turn,
            reward=reward,
            done=is_done,
        )
