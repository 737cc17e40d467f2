"""The OpenEnv environment of Wordle; other modules hold its rules."""

from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..game import PLAYING, WON, Game
from ..models import WordleAction, WordleObservation
from ..rules import MAX_TURNS, absent, pattern, present
from ..words import DEFAULT_LIST, LISTS, SPLITS, TaskError, choose_answer, num_tasks


class WordleEnvironment(Environment[WordleAction, WordleObservation, State]):
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
        words: str = DEFAULT_LIST,
        holdout: bool = True,
    ) -> WordleObservation:
        """Start a game whose answer is given by `index`, else by `seed`, else random.

        Raises TaskError (a ValueError) for a list, split, index or seed that does not exist;
        the game in progress then continues.
        """
        answer = choose_answer(split, words, index, seed, holdout)
        self._game = Game(answer=answer, words=words)
        self._state = State(episode_id=episode_id or str(uuid4()))
        message = f"Guess the five-letter word. You have {MAX_TURNS} turns."
        return _observe(self._game, message, reward=None)

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
        words: str = DEFAULT_LIST,
        holdout: bool = True,
    ) -> WordleObservation:
        """Run `reset` on the event loop. OpenEnv reads the keywords from this signature."""
        return self.reset(seed, episode_id, split=split, index=index, words=words, holdout=holdout)

    def step(
        self, action: WordleAction, timeout_s: float | None = None, **_: Any
    ) -> WordleObservation:
        """Take one turn. The reward is 1.0 for the winning guess and 0.0 for any other.

        Before the first `reset` and after the end, it returns `done`, a message and no reward.
        """
        if self._game is None:
            message = "No game was started. Reset first."
            return WordleObservation(message=message, reward=0.0, done=True)
        was_playing = self._game.status == PLAYING
        message = self._game.play(action.guess)
        self._state.step_count += was_playing
        return _observe(self._game, message, reward=float(was_playing and self._game.status == WON))

    async def step_async(
        self, action: WordleAction, timeout_s: float | None = None, **_: Any
    ) -> WordleObservation:
        """Run `step` on the event loop."""
        return self.step(action)

    @property
    def state(self) -> State:
        """Return the episode's id and the number of turns taken; never the answer."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="wordle", description="Guess a five-letter word in six turns", version="0.1.0"
        )

    def list_splits(self) -> list[dict[str, Any]]:
        """List the splits: `num_tasks` is for the default list, `num_tasks_by_words` for all."""
        return [
            {
                "name": split,
                "type": "train" if split == "train" else "validation",
                "num_tasks": num_tasks(split),
                "num_tasks_by_words": {words: num_tasks(split, words) for words in LISTS},
            }
            for split in SPLITS
        ]

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split, with the default list."""
        return num_tasks(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the reset keywords of one task of the default list. Raises TaskError."""
        if not 0 <= index < num_tasks(split):
            raise TaskError(f"split {split!r} has {num_tasks(split)} tasks, got index {index}")
        return {"split": split, "index": index}

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the reset keywords of the tasks `start:stop`."""
        indices = range(num_tasks(split))[start:stop]
        return [{"split": split, "index": index} for index in indices]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the reset keywords of all tasks of the split, with the default list."""
        return self.get_task_range(split)


def _observe(game: Game, message: str, reward: float | None) -> WordleObservation:
    is_done = game.status != PLAYING
    return WordleObservation(
        board=game.board,
        guess=game.guess,
        marks=game.marks,
        pattern=pattern(game.board),
        present=present(game.board),
        absent=absent(game.board),
        message=message,
        turn=game.turn,
        turns_left=MAX_TURNS - game.turn,
        status=game.status,
        words=game.words,
        answer=game.answer if is_done else "",
        reward=reward,
        done=is_done,
    )
