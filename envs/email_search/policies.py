"""Scripted policies for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here a tool call.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from .answers import AMOUNT, found_in, plain
from .kinds import KINDS, PERSON, Kind
from .vocabulary import FIRST_NAMES, LAST_NAMES, POOLS

Observations = Sequence[Mapping[str, Any]]

NAMES = POOLS | {PERSON: tuple(map(" ".join, product(FIRST_NAMES, LAST_NAMES)))}
NUM_READ = 8


def search_and_read(observations: Observations, rng: random.Random) -> str:
    """Search for the names in the question, and read the hits from the latest one on.

    It answers from the first hit with all the names and an answer. It knows the question templates.
    """
    kind, keys = _understand(observations[0]["question"])
    texts = [_text(observation) for observation in observations[1:]]
    if not texts:
        return _call("search", query=" ".join(keys), limit=NUM_READ)
    fitting = [text for text in texts[1:] if all(key in plain(_body(text)) for key in keys)]
    hits = sorted(re.findall(r"^(m\d+) \|", texts[0], re.MULTILINE))  # in order of time
    if len(texts) > len(hits):
        return _answer(kind, fitting)
    return _found(kind, fitting) or _call("read", message_id=hits[-len(texts)])


def first_hit(observations: Observations, rng: random.Random) -> str:
    """Search for the whole question, read the first hit, and answer from it."""
    question, texts = observations[0]["question"], [_text(each) for each in observations[1:]]
    if not texts:
        return _call("search", query=question, limit=1)
    if len(texts) == 1:
        return _call("read", message_id=texts[0].partition(" ")[0])
    return _answer(_understand(question)[0], texts[1:])


def random_message(observations: Observations, rng: random.Random) -> str:
    """Read a random message, and answer from it if it has an answer of the right kind."""
    if len(observations) == 1:
        number = rng.randint(1, observations[0]["num_messages"])
        return _call("read", message_id=f"m{number:03}")
    return _answer(_understand(observations[0]["question"])[0], [_text(observations[1])])


def _understand(question: str) -> tuple[Kind, list[str]]:
    """Return the question's kind and its keys, as lowercase words."""
    for kind in KINDS:
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(kind.question))
        match = re.fullmatch(pattern, question)
        if match:
            return kind, list(map(plain, match.groups()))
    raise ValueError(f"no kind of question is like {question!r}")


def _answer(kind: Kind, messages: Sequence[str]) -> str:
    return _found(kind, messages) or _call("answer", text="I don't know", message_ids=[])


def _found(kind: Kind, messages: Sequence[str]) -> str | None:
    """Answer from the first message that has an answer of the kind."""
    for message in messages:
        found = found_in(_body(message), kind.answer, NAMES)
        if found:
            value = found.pop()
            text = f"{value / 100:.2f}" if kind.answer == AMOUNT else str(value)
            return _call("answer", text=text, message_ids=[_message_id(message)])
    return None


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _text(observation: Mapping[str, Any]) -> str:
    return (observation["result"] or {"data": ""})["data"]


def _body(message: str) -> str:
    return message.partition("\n\n")[2]


def _message_id(message: str) -> str:
    return message.partition("\n")[0].removeprefix("Id: ")
