"""The OpenEnv environment of 2048; other modules hold the game."""

from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..game import DEFAULT_MAX_MOVES, MAX_MOVES, PLAYING, Game
from ..models import Game2048Action, Game2048Observation
from ..tasks import NUM_TASKS, TaskError, chance_of, count_tasks, require_integer

MAX_SCALE = 1000


class Game2048Environment(Environment[Game2048Action, Game2048Observation, State]):
    """Plays one game at a time; `reset` starts the next.

    The asynchronous methods exist for speed: OpenEnv runs them on the server's event loop, but
    the synchronous ones in one thread per session, which takes longer than a turn.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._game: Game | None = None
        self._reward_scale = 1.0
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
        max_moves: int = DEFAULT_MAX_MOVES,
        reward_scale: float = 1.0,
    ) -> Game2048Observation:
        """Start a game whose tiles are given by `index`, else by `seed`, else random.

        Raises TaskError (a ValueError) for a split, index, seed, limit or scale that does not
        exist; the game in progress then continues.
        """
        require_integer("max_moves", max_moves, *MAX_MOVES)
        _require_scale(reward_scale)
        self._game = Game(chance_of(split, index, seed), max_moves)
        self._reward_scale = reward_scale
        self._state = State(episode_id=episode_id or str(uuid4()))
        message = "Slide the tiles; equal ones merge."
        return _observe(self._game, message, reward=None)

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
        max_moves: int = DEFAULT_MAX_MOVES,
        reward_scale: float = 1.0,
    ) -> Game2048Observation:
        """Run `reset` on the event loop. OpenEnv reads the keywords from this signature."""
        return self.reset(
            seed,
            episode_id,
            split=split,
            index=index,
            max_moves=max_moves,
            reward_scale=reward_scale,
        )

    def step(
        self, action: Game2048Action, timeout_s: float | None = None, **_: Any
    ) -> Game2048Observation:
        """Make one move. The reward is its points times `reward_scale`.

        Before the first `reset` and after the end, it returns `done`, a message and no reward.
        """
        if self._game is None:
            message = "No game was started. Reset first."
            return Game2048Observation(message=message, reward=0.0, done=True)
        was_playing = self._game.status == PLAYING
        message = self._game.play(action.action)
        self._state.step_count += was_playing
        return _observe(self._game, message, reward=self._game.points * self._reward_scale)

    async def step_async(
        self, action: Game2048Action, timeout_s: float | None = None, **_: Any
    ) -> Game2048Observation:
        """Run `step` on the event loop."""
        return self.step(action)

    @property
    def state(self) -> State:
        """Return the episode's id and the number of moves used."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="game2048", description="Slide tiles, merge equal ones", version="0.1.0"
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


def _require_scale(scale: object) -> None:
    if type(scale) not in (int, float) or not 0 <= scale <= MAX_SCALE:
        raise TaskError(f"reward_scale must be a number from 0 to {MAX_SCALE}, got {scale!r}")


def _observe(game: Game, message: str, reward: float | None) -> Game2048Observation:
    return Game2048Observation(
        board=[list(row) for row in game.board],
        grid=game.grid,
        score=game.score,
        points=game.points,
        legal_actions=game.legal_moves if game.status == PLAYING else [],
        message=message,
        turn=game.turn,
        turns_left=game.max_moves - game.turn,
        status=game.status,
        reward=reward,
        done=game.status != PLAYING,
    )
