"""The OpenEnv environment of Blackjack; other modules hold the game."""

from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..game import PLAYING, Game
from ..models import BlackjackAction, BlackjackObservation
from ..tasks import NUM_TASKS, TaskError, chance_of, count_tasks


class BlackjackEnvironment(Environment[BlackjackAction, BlackjackObservation, State]):
    """Plays one hand at a time; `reset` deals the next.

    The asynchronous methods exist for speed: OpenEnv runs them on the server's event loop, but
    the synchronous ones in one thread per session, which takes longer than a turn.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._game: Game | None = None
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
    ) -> BlackjackObservation:
        """Start a hand whose cards are given by `index`, else by `seed`, else random.

        Raises TaskError (a ValueError) for a split, index or seed that does not exist; the
        hand in progress then continues.
        """
        self._game = Game(chance_of(split, index, seed))
        self._state = State(episode_id=episode_id or str(uuid4()))
        return _observe(self._game, "Hit or stand?", reward=None)

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
    ) -> BlackjackObservation:
        """Run `reset` on the event loop. OpenEnv reads the keywords from this signature."""
        return self.reset(seed, episode_id, split=split, index=index)

    def step(
        self, action: BlackjackAction, timeout_s: float | None = None, **_: Any
    ) -> BlackjackObservation:
        """Take one action. The reward is the game's own at the end and 0.0 before.

        Before the first `reset` and after the end, it returns `done`, a message and no reward.
        """
        if self._game is None:
            message = "No hand was dealt. Reset first."
            return BlackjackObservation(message=message, reward=0.0, done=True)
        was_playing = self._game.status == PLAYING
        message = self._game.play(action.action)
        self._state.step_count += was_playing
        return _observe(self._game, message, reward=self._game.reward if was_playing else 0.0)

    async def step_async(
        self, action: BlackjackAction, timeout_s: float | None = None, **_: Any
    ) -> BlackjackObservation:
        """Run `step` on the event loop."""
        return self.step(action)

    @property
    def state(self) -> State:
        """Return the episode's id and the number of actions taken; never the hidden card."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="blackjack", description="Hit or stand against a dealer", version="0.1.0"
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


def _observe(game: Game, message: str, reward: float | None) -> BlackjackObservation:
    is_done = game.status != PLAYING
    return BlackjackObservation(
        cards=game.player.cards,
        total=game.player.total,
        soft=game.player.is_soft,
        dealer_card=game.dealer_card,
        dealer_cards=game.dealer.cards if is_done else [],
        dealer_total=game.dealer.total if is_done else 0,
        legal_actions=game.legal_actions,
        message=message,
        turn=game.turn,
        status=game.status,
        reward=reward,
        done=is_done,
    )
