"""The games of `end_to_end.py`: as overrides of our configuration, and played without a server.

`words` is the environment `wordle`. In `mailbox` every reply is read as a call of the tool `read`
of the environment `email_search`, whatever the model says, so that each turn has a message of about
200 tokens as the tool's result. `drawn` has lengths that a seed draws (`end_to_end_drawn.py`).
"""

import json
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from email_search.episode import Episode
from email_search.mailbox import mailbox
from email_search.tasks import choose_task
from end_to_end_drawn import DrawnGame, draw_rules
from wordle.game import Game
from wordle.words import answers

from openenv_pipe.environments.adapters.base import Ask
from openenv_pipe.environments.adapters.tool import result_text
from openenv_pipe.types import Action, Message, Observation, Opening

WORDS = "common250"
NUM_MESSAGES = len(mailbox(0).messages)
MAX_CALLS = 10
SYSTEM = "Guess a word of five letters."
NUM_TURNS, MAX_REPLY = 6, 16


class Play(Protocol):
    """An episode without a server."""

    def play(self, reply: str) -> str:
        """Return the text that follows a reply."""


def variety(replies: Sequence[str]) -> float:
    """A reward: how many different characters the replies have."""
    return len(set("".join(replies))) / 100


def episode_variety(episode: Any) -> float:
    return variety([turn.reply for turn in episode.turns])


VARIETY = (
    "{type: python, target: end_to_end_games:episode_variety, weight: 1.0, per_turn: false, "
    "use: sum, keywords: {}}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GameOf:
    """A game for both sides."""

    system: str  # the first message
    first: str  # the second one
    max_tokens: int  # of an episode
    num_turns: int = NUM_TURNS
    max_reply: int = MAX_REPLY  # in tokens
    start: Callable[[int], Play]  # of a task, by number
    overrides: Sequence[str]  # of our configuration, for the environment
    reward: Callable[[Sequence[str]], float] = variety
    term: str = VARIETY  # the same for our configuration


def message_of(reply: str) -> str:
    """Return the id of the message that a reply reads."""
    return f"m{1 + zlib.crc32(reply.encode()) % NUM_MESSAGES:03d}"


class Calls:
    """An episode of `email_search` in which every reply reads a message."""

    def __init__(self, number: int) -> None:
        self._episode = Episode(task=choose_task("train", number, None), max_calls=MAX_CALLS)

    def play(self, reply: str) -> str:
        return self._episode.read(message_of(reply))


class MailboxAdapter:
    """Turns every reply into a call of `read` (`openenv_pipe.environments.adapters.base`)."""

    def __init__(self, system: str, first: str) -> None:
        self._opening = Opening(
            messages=[{"role": "system", "content": system}, {"role": "user", "content": first}]
        )

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        return self._opening

    def read(self, reply: str) -> Sequence[Action]:
        arguments = {"message_id": message_of(reply)}
        return [{"type": "call_tool", "tool_name": "read", "arguments": arguments}]

    def follow(self, observation: Observation) -> list[Message]:
        return [{"role": "user", "content": result_text(observation)}]

    def reject(self, why: str) -> list[Message]:
        raise AssertionError(f"every reply is a call, but: {why}")


def _start_word(number: int) -> Game:
    words = answers("train", WORDS, holdout=False)
    return Game(answer=words[number % len(words)], words=WORDS)


def _assigned(block: str, values: dict[str, Any]) -> list[str]:
    return [f"{block}.{key}={json.dumps(value)}" for key, value in values.items()]


def system_text(prompt_tokens: int) -> str:
    """Return the first message, lengthened to about so many tokens of one character each."""
    return (SYSTEM + " " * prompt_tokens)[: max(len(SYSTEM), prompt_tokens)]


def words(prompt_tokens: int) -> GameOf:
    system = system_text(prompt_tokens)
    adapter = {"first": "?", "following": "{{ message }}", "pattern": "(?s)^(?P<guess>.*)$"}
    return GameOf(
        system=system,
        first="?",
        max_tokens=1024,
        start=_start_word,
        overrides=_assigned("env.adapter", {"system": system} | adapter),
    )


def mailbox_of(prompt_tokens: int) -> GameOf:
    system = system_text(prompt_tokens)
    overrides = [
        *("env=base", "env.name=mailbox", "env.package=email_search", "env/adapter=python"),
        *("~env.tasks.train.reset.holdout", "~env.tasks.eval.reset.holdout"),
        "+env.tasks.eval.reset.split=eval",
        "env.adapter.target=end_to_end_games:MailboxAdapter",
        *_assigned("+env.adapter.options", {"system": system, "first": "?"}),
    ]
    return GameOf(system=system, first="?", max_tokens=2048, start=Calls, overrides=overrides)


def drawn(seed: int) -> GameOf:
    rules = draw_rules(seed)
    system = system_text(rules.prompt_tokens)
    adapter = {"first": "?", "following": "{{ message }}", "pattern": "(?s)^(?P<message>.*)$"}
    script = Path(__file__).with_name("end_to_end_drawn.py")
    overrides = [
        *("env=base", "env.name=drawn", "env.tasks.train.index_key=index"),
        *("~env.tasks.train.reset.holdout", "~env.tasks.eval.reset.holdout"),
        f"env.command=[{sys.executable},{script},'{{port}}','{seed}']",
        *_assigned("env.adapter", {"system": system} | adapter),
    ]
    return GameOf(
        system=system,
        first="?",
        max_tokens=2048,
        num_turns=rules.num_turns,
        max_reply=rules.max_reply,
        start=partial(DrawnGame, rules),
        overrides=overrides,
        reward=lambda replies: sum(bool(re.search(rules.pattern, each)) for each in replies),
        term=f"{{type: regex, pattern: '{rules.pattern}', weight: 1.0, per_turn: false}}",
    )


GAMES = {"words": words, "mailbox": mailbox_of, "drawn": drawn}
