"""The games of `end_to_end.py`: as overrides of our configuration, and played without a server.

`words` is the environment `wordle`. In `mailbox` every reply is read as a call of the tool `read`
of the environment `email_search`, whatever the model says, so that each turn has a message of about
200 tokens as the tool's result.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from email_search.episode import Episode
from email_search.mailbox import mailbox
from email_search.tasks import choose_task
from wordle.game import Game
from wordle.words import answers

from openenv_pipe.environments.adapters.base import Ask
from openenv_pipe.environments.adapters.tool import result_text
from openenv_pipe.types import Action, Message, Observation, Opening

WORDS = "common250"
NUM_MESSAGES = len(mailbox(0).messages)
MAX_CALLS = 10


class Play(Protocol):
    """An episode without a server."""

    def play(self, reply: str) -> str:
        """Return the text that follows a reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GameOf:
    """A game for both sides."""

    first: str  # the message that begins an episode
    max_tokens: int  # of an episode
    start: Callable[[int], Play]  # of a task, by number
    overrides: Callable[[str], list[str]]  # of our configuration, for a system message


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


def _word_overrides(system: str) -> list[str]:
    adapter = {"first": "?", "following": "{{ message }}", "pattern": "(?s)^(?P<guess>.*)$"}
    return _assigned("env.adapter", {"system": system} | adapter)


def _mailbox_overrides(system: str) -> list[str]:
    return [
        *("env=base", "env.name=mailbox", "env.package=email_search", "env/adapter=python"),
        *("~env.tasks.train.reset.holdout", "~env.tasks.eval.reset.holdout"),
        "+env.tasks.eval.reset.split=eval",
        "env.adapter.target=end_to_end_games:MailboxAdapter",
        *_assigned("+env.adapter.options", {"system": system, "first": "?"}),
    ]


def _assigned(block: str, values: dict[str, Any]) -> list[str]:
    return [f"{block}.{key}={json.dumps(value)}" for key, value in values.items()]


GAMES = {
    "words": GameOf(first="?", max_tokens=1024, start=_start_word, overrides=_word_overrides),
    "mailbox": GameOf(first="?", max_tokens=2048, start=Calls, overrides=_mailbox_overrides),
}
