"""The grade of an answer: a pure function of the question, the answer and the cited messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from .answers import found_in, plain
from .mailbox import Mailbox, Question

RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"
REWARDS = {RIGHT: 0.8, UNKNOWN: 0.0, WRONG: -0.5}
CITATION = 0.2  # earned by citing the right message and no other
MAX_ANSWER = 500  # characters
UNKNOWN_ANSWERS = ("", "i don t know", "i do not know", "don t know", "unknown")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """`citation` is 1 / the number of cited messages if the source is cited, else 0.0."""

    verdict: str
    citation: float

    @property
    def reward(self) -> float:
        return round(REWARDS[self.verdict] + CITATION * self.citation, 6)


def grade(question: Question, mailbox: Mailbox, text: str, message_ids: Sequence[str]) -> Grade:
    """Grade an answer. It is right if it contains the right value and no other of its kind.

    A text of more than MAX_ANSWER characters is wrong.
    """
    cited = {message_id.strip() for message_id in message_ids}
    citation = 1 / len(cited) if question.source in cited else 0.0
    return Grade(verdict=_verdict(question, mailbox, text), citation=citation)


def _verdict(question: Question, mailbox: Mailbox, text: str) -> str:
    if plain(text) in UNKNOWN_ANSWERS:
        return UNKNOWN
    if len(text) > MAX_ANSWER:
        return WRONG
    found = found_in(text, question.answer_kind, mailbox.names)
    return RIGHT if found == {question.answer} else WRONG
