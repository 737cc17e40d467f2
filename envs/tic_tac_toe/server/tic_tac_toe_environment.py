"""The OpenEnv environment of tic-tac-toe; other modules hold the game."""

from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..game import MAX_RANDOM_MOVES, PLAYING, Game
from ..models import TicTacToeAction, TicTacToeObservation
from ..rules import draw
from ..tasks import NUM_TASKS, TaskError, chance_of, count_tasks, require_integer


class TicTacToeEnvironment(Environment[TicTacToeAction, TicTacToeObservation, State]):
    """Plays one game at a time; `reset` starts the next.

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
        random_moves: int = 0,
    ) -> TicTacToeObservation:
        """Start a game. `index`, else `seed`, else chance draws up to `random_moves` first moves.

        Raises TaskError (a ValueError) for a split, index, seed or number that does not exist; the
        game in progress then continues.
        """
        require_integer("random_moves", random_moves, 0, MAX_RANDOM_MOVES)
        self._game = Game(chance_of(split, index, seed), random_moves)
        self._state = State(episode_id=episode_id or str(uuid4()))
        return _observe(self._game, "Three in a row win.", reward=None)

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
        random_moves: int = 0,
    ) -> TicTacToeObservation:
        """Run `reset` on the event loop. OpenEnv reads the keywords from this signature."""
        return self.reset(
            seed,
            episode_id,
            split=split,
            index=index,
            random_moves=random_moves,
        )

    def step(
        self, action: TicTacToeAction, timeout_s: float | None = None, **_: Any
    ) -> TicTacToeObservation:
        """Move for the player whose turn it is. The reward is this player's.

        Before the first `reset` and after the end, it returns `done`, a message and no reward.
        """
        if self._game is None:
            message = "No game was started. Reset first."
            return TicTacToeObservation(message=message, reward=0.0, done=True)
        mover, was_playing = self._game.turn, self._game.status == PLAYING
        message = self._game.play(action.action)
        self._state.step_count += was_playing
        rewards = (self._game.rewards if was_playing else None) or {}
        return _observe(self._game, message, reward=rewards.get(mover, 0.0))

    async def step_async(
        self, action: TicTacToeAction, timeout_s: float | None = None, **_: Any
    ) -> TicTacToeObservation:
        """Run `step` on the event loop."""
        return self.step(action)

    @property
    def state(self) -> State:
        """Return the episode's id and the number of moves made."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="tic_tac_toe", description="Two players, three in a row", version="0.1.0"
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


def _observe(game: Game, message: str, reward: float | None) -> TicTacToeObservation:
    is_over = game.status != PLAYING
    return TicTacToeObservation(
        board=game.board,
        grid=draw(game.board),
        turn=game.turn,
        legal_actions=[] if is_over else game.legal_moves,
        message=message,
        winner=game.winner,
        status=game.status,
        rewards=game.rewards,
        reward=reward,
        done=is_over,
    )
