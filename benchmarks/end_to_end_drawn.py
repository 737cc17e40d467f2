"""A word game of `end_to_end.py` that nobody can tune for: its lengths are drawn from a seed.

As a program it serves the game over OpenEnv's protocol:

    python benchmarks/end_to_end_drawn.py PORT SEED
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

HINTS = ("", " letters are right.", " letters are right. Try another word of the same length.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a seed draws."""

    word_length: int
    num_turns: int
    max_reply: int  # in tokens
    prompt_tokens: int
    hint: str  # what follows the number of right letters
    pattern: str  # counted in replies, as the reward


def draw_rules(seed: int) -> Rules:
    draw = random.Random(seed)
    word_length = draw.randint(3, 9)
    return Rules(
        word_length=word_length,
        num_turns=draw.randint(3, 9),
        max_reply=word_length + draw.randint(2, 20),
        prompt_tokens=draw.randint(32, 256),
        hint=draw.choice(HINTS),
        pattern=f"[{''.join(draw.sample('abcdefghijklmnopqrstuvwxyz', 6))}]",
    )


class DrawnGame:
    """An episode: guesses at a word of random letters."""

    def __init__(self, rules: Rules, number: int) -> None:
        """number: of the task, which gives the word."""
        self._rules = rules
        letters = random.Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=rules.word_length)
        self._word = "".join(letters)

    def play(self, reply: str) -> str:
        guess = reply.strip().lower()[: self._rules.word_length]
        num_right = sum(ours == theirs for ours, theirs in zip(guess, self._word, strict=False))
        return f"{num_right}{self._rules.hint}"


def serve(port: int, rules: Rules) -> None:
    """Serve until SIGTERM or SIGINT."""
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import State

    sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))
    from echo.models import EchoAction, EchoObservation

    class Drawn(Environment[EchoAction, EchoObservation, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, *, index: int = 0) -> EchoObservation:
            self._game, self._turns = DrawnGame(rules, index), 0
            return EchoObservation()

        async def reset_async(self, seed=None, episode_id=None, *, index: int = 0):
            return self.reset(index=index)

        def step(self, action: EchoAction, timeout_s=None, **_) -> EchoObservation:
            self._turns += 1
            is_over = self._turns == rules.num_turns
            return EchoObservation(message=self._game.play(action.message), done=is_over)

        async def step_async(self, action: EchoAction, timeout_s=None, **_) -> EchoObservation:
            return self.step(action)

        @property
        def state(self) -> State:
            return State(step_count=self._turns)

    app = create_app(Drawn, EchoAction, EchoObservation, env_name="drawn", max_concurrent_envs=256)
    uvicorn.run(app, port=port, ws_per_message_deflate=False, log_level="warning")


if __name__ == "__main__":
    serve(int(sys.argv[1]), draw_rules(int(sys.argv[2])))
