"""Three guesses at a word, and what is wrong with it:

deaf       the seed is not read: each reset takes the next word
leak       the answer stands in a field of every observation
rescored   a step after the end is rewarded once more
hoard      every episode leaves memory behind
lonely     one session, whatever is asked for
constant   every guess earns the same
frozen     the second guess at one word never ends, and blocks all sessions
"""

import itertools
import os
import random
import time
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

FAULTS = set(os.environ["FAULTS"].split())
WORDS = [f"{first}{second}ord" for first in "abcdefgh" for second in "klmnprst"]
NUM_GUESSES = 3
HOARDED_BYTES = 200_000
hoard: list[bytes] = []
next_words = itertools.cycle(WORDS)  # by chance two resets would have the same one now and then


class Guess(Action):
    guess: str


class Seen(Observation):
    hint: str = ""
    answer: str = ""


class BadEnvironment(Environment[Guess, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._answer = ""
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        drawn = random.Random(seed).choice(WORDS)
        self._answer = next(next_words) if "deaf" in FAULTS else drawn
        self._state = State(episode_id=episode_id, step_count=0)
        if "hoard" in FAULTS:
            hoard.append(random.randbytes(HOARDED_BYTES))
        return self._seen(None)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Seen:
        is_over = self._state.step_count >= NUM_GUESSES
        self._state.step_count += 1
        if "constant" in FAULTS:
            return self._seen(0.25)
        if is_over and "rescored" not in FAULTS:
            return self._seen(0.0)
        common = set(action.guess) & set(self._answer)
        return self._seen(len(common) / 10)

    @property
    def state(self) -> State:
        return self._state

    def _seen(self, reward: float | None) -> Seen:
        is_done = self._state.step_count >= NUM_GUESSES
        return Seen(
            hint=f"It is like {self._answer}." if "leak" in FAULTS else self._answer[0],
            answer=self._answer if is_done else "",
            reward=reward,
            done=is_done,
        )


async def frozen_step(self: BadEnvironment, action: Guess, **_: Any) -> Seen:
    """Run on the server's loop, as steps do that are coroutines."""
    if self._answer == WORDS[-1] and self._state.step_count == 1:
        time.sleep(10**6)
    return self.step(action)


if "frozen" in FAULTS:
    BadEnvironment.step_async = frozen_step


app = create_app(
    BadEnvironment,
    Guess,
    Seen,
    env_name="bad_env",
    max_concurrent_envs=1 if "lonely" in FAULTS else int(os.environ["MAX_CONCURRENT_ENVS"]),
)
