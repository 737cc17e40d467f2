"""Generate a mailbox from its number: messages in order of time, and the questions they answer.

Each kind has `FACTS_PER_KIND` facts. A later message updates every second fact and is then the only
source of its answer. The other messages are irrelevant, but mention the same names.
"""

import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from .answers import YEAR, draw, write
from .kinds import KINDS, PERSON, Kind
from .vocabulary import (
    ASIDES,
    CHATTER,
    CLOSINGS,
    DAYS,
    FIRST_NAMES,
    GREETINGS,
    LAST_NAMES,
    POOLS,
)

FACTS_PER_KIND, NUM_CHATTER, NUM_PEOPLE = 8, 200, 14
QUESTIONS_PER_MAILBOX = FACTS_PER_KIND * len(KINDS)
MAX_CACHED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One email. `message_id`, such as m017, is its position in order of time."""

    message_id: str
    time: datetime
    sender: str
    subject: str
    body: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """`source` is the id of the message with the answer; `answer_kind` says how to compare."""

    text: str
    answer_kind: str
    answer: Any
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mailbox:
    """`names` has the pools that answers are drawn from, including this mailbox's people."""

    messages: tuple[Message, ...]
    questions: tuple[Question, ...]
    names: dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """A message before it gets its id; `question` is the one that it answers, if any."""

    time: datetime
    sender: str
    subject: str
    body: str
    question: tuple[str, str, Any] | None = None


@lru_cache(maxsize=MAX_CACHED)
def mailbox(number: int) -> Mailbox:
    """Return mailbox `number`; the same number gives the same mailbox on any machine."""
    rng = random.Random(f"mailbox {number}")
    first_names, last_names = (
        rng.sample(names, k=NUM_PEOPLE) for names in (FIRST_NAMES, LAST_NAMES)
    )
    people = tuple(map(" ".join, zip(first_names, last_names, strict=True)))
    names = POOLS | {PERSON: people}
    drafts = [draft for kind in KINDS for draft in _facts(kind, names, rng)]
    drafts += [_chatter(names, rng) for _ in range(NUM_CHATTER)]
    drafts.sort(key=lambda draft: draft.time)
    return _number(drafts, names, rng)


def _number(drafts: list[_Draft], names: dict[str, tuple[str, ...]], rng: random.Random) -> Mailbox:
    messages, questions = [], []
    for position, draft in enumerate(drafts, start=1):
        message_id = f"m{position:03}"
        messages.append(
            Message(
                message_id=message_id,
                time=draft.time,
                sender=draft.sender,
                subject=draft.subject,
                body=draft.body,
            )
        )
        if draft.question:
            text, kind, answer = draft.question
            questions.append(
                Question(text=text, answer_kind=kind, answer=answer, source=message_id)
            )
    rng.shuffle(questions)
    return Mailbox(messages=tuple(messages), questions=tuple(questions), names=names)


def _facts(kind: Kind, names: dict[str, tuple[str, ...]], rng: random.Random) -> list[_Draft]:
    """Return the messages of all facts of a kind; every second fact has an update."""
    drafts = []
    for number, keys in enumerate(_distinct_keys(kind, names, rng)):
        time = _draw_time(rng)
        sender, subject = rng.choice(names[PERSON]), rng.choice(kind.subjects).format(**keys)
        answer = draw(kind.answer, names, rng)
        question = kind.question.format(**keys)
        is_updated = number % 2 == 1
        for texts in (kind.texts, kind.updates)[: 1 + is_updated]:
            is_last = texts is kind.updates or not is_updated
            text = rng.choice(texts).format(**keys, answer=write(kind.answer, answer, rng))
            drafts.append(
                _Draft(
                    time=time,
                    sender=sender,
                    subject=subject,
                    body=_body(text, sender, rng),
                    question=(question, kind.answer, answer) if is_last else None,
                )
            )
            subject = f"Re: {subject}"
            time += timedelta(days=rng.randint(1, 20), minutes=rng.randrange(300))
            answer = _another(kind.answer, answer, names, rng)
    return drafts


def _distinct_keys(
    kind: Kind, names: dict[str, tuple[str, ...]], rng: random.Random
) -> list[dict[str, str]]:
    drawn: dict[tuple[str, ...], None] = {}
    while len(drawn) < FACTS_PER_KIND:
        drawn[tuple(rng.choice(names[key]) for key in kind.keys)] = None
    return [dict(zip(kind.keys, keys, strict=True)) for keys in drawn]


def _another(kind: str, answer: Any, names: dict[str, tuple[str, ...]], rng: random.Random) -> Any:
    while (other := draw(kind, names, rng)) == answer:
        continue
    return other


def _chatter(names: dict[str, tuple[str, ...]], rng: random.Random) -> _Draft:
    values = {key: rng.choice(pool) for key, pool in names.items()} | {"day": rng.choice(DAYS)}
    subject, text = (part.format(**values) for part in rng.choice(CHATTER))
    sender = rng.choice(names[PERSON])
    return _Draft(
        time=_draw_time(rng), sender=sender, subject=subject, body=_body(text, sender, rng)
    )


def _body(text: str, sender: str, rng: random.Random) -> str:
    sentences = [text[0].upper() + text[1:], *rng.sample(ASIDES, k=rng.randint(0, 2))]
    rng.shuffle(sentences)
    first_name = sender.split()[0]
    return f"{rng.choice(GREETINGS)}\n{' '.join(sentences)}\n{rng.choice(CLOSINGS)}\n{first_name}"


def _draw_time(rng: random.Random) -> datetime:
    return datetime(YEAR, 1, 2, 8) + timedelta(days=rng.randrange(330), minutes=rng.randrange(600))
