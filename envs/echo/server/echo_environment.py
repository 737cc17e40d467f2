"""The OpenEnv environment of Echo; other modules hold its rules."""

from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..models import EchoAction, EchoObservation
from ..rules import MAX_TURNS, NUM_TASKS, TaskError, choose_letters, count_tasks, score


class EchoEnvironment(Environment[EchoAction, EchoObservation, State]):
    """Plays one episode at a time; `reset` starts the next.

    The asynchronous methods exist for speed: OpenEnv runs them on the server's event loop, but
    the synchronous ones in one thread per session, which takes longer than a turn.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._letters = ""  # one for each turn; none before the first reset
        self._turn = 0
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
        turns: int = 1,
    ) -> EchoObservation:
        """Start an episode whose letters are given by `index`, else by `seed`, else random.

        Raises TaskError (a ValueError) for a split, index, seed or number of turns that does
        not exist; the episode in progress then continues.
        """
        if type(turns) is not int or not 1 <= turns <= MAX_TURNS:
            raise TaskError(f"turns must be an integer from 1 to {MAX_TURNS}, got {turns!r}")
        self._letters = choose_letters(split, index, seed)[:turns]
        self._turn = 0
        self._state = State(episode_id=episode_id or str(uuid4()))
        return self._observe(echoed="", reward=None)

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
        turns: int = 1,
    ) -> EchoObservation:
        """Run `reset` on the event loop. OpenEnv reads the keywords from this signature."""
        return self.reset(seed, episode_id, split=split, index=index, turns=turns)

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        """Reward the message with `rules.score` divided by the episode's number of turns.

        The rewards of an episode thus sum to at most 1.0. Before the first `reset` and after the
        end, it returns `done`, a message and no reward.
        """
        if self._turn == len(self._letters):
            message = "The episode is over, or was never started. Reset to start one."
            return EchoObservation(message=message, turn=self._turn, reward=0.0, done=True)
        reward = score(action.message, self._letters[self._turn]) / len(self._letters)
        self._turn += 1
        self._state.step_count += 1
        return self._observe(echoed=action.message, reward=reward)

    async def step_async(
        self, action: EchoAction, timeout_s: float | None = None, **_: Any
    ) -> EchoObservation:
        """Run `step` on the event loop."""
        return self.step(action)

    @property
    def state(self) -> State:
        """Return the episode's id and the number of turns taken."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="echo", description="Write the letter that is asked for", version="0.1.0"
        )

    def list_splits(self) -> list[dict[str, Any]]:
        """List the splits with their numbers of tasks."""
        return [
            {
                "name": split,
                "type": "train" if split == "train" else "validation",
                "num_tasks": num_tasks,
            }
            for split, num_tasks in NUM_TASKS.items()
        ]

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        return count_tasks(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the reset keywords of one task. Raises TaskError."""
        if not 0 <= index < count_tasks(split):
            raise TaskError(f"split {split!r} has {count_tasks(split)} tasks, got index {index}")
        return {"split": split, "index": index}

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the reset keywords of the tasks `start:stop`."""
        indices = range(count_tasks(split))[start:stop]
        return [{"split": split, "index": index} for index in indices]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the reset keywords of all tasks of the split."""
        return self.get_task_range(split)

    def _observe(self, echoed: str, reward: float | None) -> EchoObservation:
        is_done = self._turn == len(self._letters)
        letter = "" if is_done else self._letters[self._turn]
        return EchoObservation(
            letter=letter,
            echoed=echoed,
            message="" if is_done else f"Write only the letter {letter}.",
            turn=self._turn,
            turns_left=len(self._letters) - self._turn,
            reward=reward,
            done=is_done,
        )
