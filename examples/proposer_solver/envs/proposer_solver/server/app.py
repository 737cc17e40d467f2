"""The OpenEnv server of the game, and `python -m proposer_solver.server.app` to run it."""

from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from ..game import Game


class WordAction(Action):
    word: str = Field(description="A word to solve, or a word backwards")


class WordObservation(Observation):
    turn: str = Field(default="", description="Who is to move: proposer or solver")
    word: str = Field(default="", description="What the solver is to write backwards")
    length: int = Field(default=0, description="How many letters the proposed word has")
    rewards: dict[str, float] | None = Field(default=None, description="What the step has earned")


class WordEnvironment(Environment[WordAction, WordObservation, State]):
    """Plays one game at a time; `reset` starts the next."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._game = Game()
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, *, index: int = 0
    ) -> WordObservation:
        """Start a game. All games begin alike; `index` only tells tasks apart."""
        self._game = Game()
        self._state = State(episode_id=episode_id or str(uuid4()))
        return self._observe(None)

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, *, index: int = 0
    ) -> WordObservation:
        """Run `reset` on the event loop, which is faster than in a thread."""
        return self.reset(seed, episode_id, index=index)

    def step(self, action: WordAction, timeout_s: float | None = None, **_: Any) -> WordObservation:
        """Make a move of the player whose turn it is."""
        rewards = self._game.play(action.word)
        self._state.step_count += 1
        return self._observe(rewards)

    async def step_async(
        self, action: WordAction, timeout_s: float | None = None, **_: Any
    ) -> WordObservation:
        """Run `step` on the event loop."""
        return self.step(action)

    @property
    def state(self) -> State:
        """Return the episode's id and the number of moves."""
        return self._state

    def _observe(self, rewards: dict[str, float] | None) -> WordObservation:
        game = self._game
        return WordObservation(
            turn=game.turn,
            word=game.word,
            length=len(game.words[0]) if game.words else 0,
            rewards=rewards,
            reward=None if rewards is None else sum(rewards.values()),
            done=game.is_over,
        )


app = create_app(
    WordEnvironment,
    WordAction,
    WordObservation,
    env_name="proposer_solver",
    max_concurrent_envs=256,
)


def main() -> None:
    """Serve on port 8000 of this machine until SIGTERM or SIGINT."""
    uvicorn.run(app, host="127.0.0.1", port=8000, timeout_graceful_shutdown=2)


if __name__ == "__main__":
    main()
