"""How answers are scored, and what each way of scoring reads in a row.

A row is what `reset` is given: `question`, `answer` and further columns. The answer stays here, on
the server.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

import regex

from .workers import ScoreError, Workers

Row = Mapping[str, Any]

MAX_ANSWER_LENGTH = 10_000
PATTERN_LIMIT_S = 1.0
MAX_LIMIT_S = 86_400
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DEFAULT_LETTERS = LETTERS[:8]  # of choices that are in the question's text
# 7, -3, 1,234, 2.5, .5, 1e3, 3/4; a minus behind a digit or a bracket subtracts.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-−–])?[$€£]?(?P<number>"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?(?:\s?/\s?(?P<divisor>[0-9]+))?"
)
# What is before a number that is only a part of one: 3,5 and 1 000, 2 3/4, 12:30, x^2, \frac{1}{2}.
BEFORE_A_PART = re.compile(r"(?:[0-9][-−–,.:'’/ \u00a0\u202f]?|[_^}]\{?|\\(?!boxed)[a-zA-Z]+\{?)$")


class RowError(ValueError):
    """A row that cannot be asked, or not scored in this way."""


class Score(Protocol):
    """Scores an answer to a row's question; 1.0 is right. Raises ScoreError."""

    def __call__(self, answer: str, row: Row) -> float: ...

    def check(self, row: Row) -> None:
        """Raise RowError if the row lacks what an answer is compared with."""


def make_score(how: str, *, folder: str, limit_s: float) -> Score:
    """Return the way of scoring called `how`: one of WAYS, `math`, or `module:function`.

    folder: where the module of a function is looked for, in addition to the installed ones.
    limit_s: of one answer, for `math` and functions.

    Raises ValueError for another name, or another limit than a positive one.
    """
    if not 0 < limit_s <= MAX_LIMIT_S:
        raise ValueError(f"QUESTIONS_LIMIT_S={limit_s:g}: expected 0 < seconds <= {MAX_LIMIT_S}")
    if how in WAYS:
        return Comparison(*WAYS[how])
    if how == "math":
        return InWorkers("questions.math_answers:is_equal", "", limit_s)
    if ":" in how:
        return InWorkers(how, folder, limit_s)
    known = ", ".join([*WAYS, "math"])
    raise ValueError(f"QUESTIONS_SCORE={how!r}: expected {known}, or a function as module:name")


def asked(row: Row) -> str:
    """Return the text of the question, with lettered choices. Raises RowError without one."""
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise RowError(f"question is {question!r}, expected a text")
    listed = [f"{letter}. {text}" for letter, text in zip(LETTERS, _choices(row), strict=False)]
    return "\n".join([question, *listed])


class Comparison:
    """Reads the same thing in the row's own answer and in the given one, and compares."""

    def __init__(
        self, own: Callable[[Row], Any], is_right: Callable[[str, Any, Row], bool]
    ) -> None:
        self._own = own
        self._is_right = is_right

    def check(self, row: Row) -> None:
        self._own(row)

    def __call__(self, answer: str, row: Row) -> float:
        own = self._own(row)
        return float(len(answer) <= MAX_ANSWER_LENGTH and self._is_right(answer, own, row))


class InWorkers:
    """Scores in processes with a time limit; an answer that takes longer earns nothing."""

    def __init__(self, target: str, folder: str, limit_s: float) -> None:
        self._workers = Workers(target, folder, limit_s)

    def check(self, row: Row) -> None:
        """Also start a worker, if there is none. Raises ScoreError if the function is not found."""
        _answer(row)
        self._workers.start()

    def __call__(self, answer: str, row: Row) -> float:
        if len(answer) > MAX_ANSWER_LENGTH:
            return 0.0
        return self._workers.score(answer, row)


def _answer(row: Row) -> str:
    """Return the row's answer as text, as JSON writes it. Raises RowError if there is none."""
    answer = row.get("answer")
    if not isinstance(answer, str | int | float) or not str(answer).strip():
        raise RowError(f"answer is {answer!r}, expected a text or a number")
    return answer if isinstance(answer, str) else json.dumps(answer)


def _words(text: str) -> str:
    return " ".join(text.split())


def number_in(text: str) -> Fraction | None:
    """Return the last number in a text; None if it has none."""
    found = list(NUMBER.finditer(text))
    if not found:
        return None
    sign, number, exponent, divisor = found[-1].group("sign", "number", "exponent", "divisor")
    try:
        value = Fraction(number.replace(",", "") + (exponent or "")) / int(divisor or 1)
    except (ValueError, ZeroDivisionError):  # more digits than Python reads; a division by 0
        return None
    return -value if sign else value


def _own_number(row: Row) -> Fraction:
    answer = _answer(row)
    number = number_in(answer)
    if number is None:
        raise RowError(f"answer is {row['answer']!r:.200}, which has no number")
    *_, last = NUMBER.finditer(answer)
    if BEFORE_A_PART.search(answer, 0, last.start()):
        raise RowError(
            f"answer is {row['answer']!r:.200}, whose last number, {last.group()}, seems to be a "
            "part of one; write it as 1234.5, -3 or 3/4, or score by math"
        )
    return number


def _choices(row: Row) -> Sequence[str]:
    """Return the texts of the choices; empty if the question's own text has them."""
    choices = row.get("choices")
    if choices is None:
        return []
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise RowError(f"choices is {choices!r:.200}, expected a list of 2 to {len(LETTERS)} texts")
    return [_words(str(choice)) for choice in choices]


def _own_choice(row: Row) -> str:
    """Return the letter of the right choice, which the answer gives by letter, text or index."""
    answer, choices = _words(_answer(row)), _choices(row)
    letters = LETTERS[: len(choices)] or DEFAULT_LETTERS
    readings = {letters[place] for place, choice in enumerate(choices) if choice == answer}
    if len(answer) == 1 and answer in letters:
        readings.add(answer)
    if type(row["answer"]) is int and choices and 0 <= row["answer"] < len(choices):
        readings.add(letters[row["answer"]])
    if len(readings) != 1:
        several = f"may mean {' or '.join(sorted(readings))}" if readings else "names no choice"
        raise RowError(
            f"answer is {row['answer']!r:.200}, which {several}; expected a letter of "
            f"{letters[0]} to {letters[-1]}, or with choices the text or the index of one"
        )
    return readings.pop()


def choice_in(text: str, row: Row) -> str | None:
    """Return the letter that a text chooses: alone, by the choice's text, or as its last letter.

    The choice's text may have its letter before it, as the question shows it.
    """
    choices = _choices(row)
    letters = LETTERS[: len(choices)] or DEFAULT_LETTERS
    given = _words(text)
    alone = given.strip("()[].:* ").upper()
    if len(alone) == 1 and alone in letters:
        return alone
    for text_of in ("(?:{})", "(?i:{})"):
        for letter, choice in zip(letters, choices, strict=False):
            shown = rf"(?:.*\b{letter}\W+)?{text_of.format(re.escape(choice))}[.*]*"
            if re.fullmatch(shown, given):
                return letter
    found = re.findall(rf"(?<!\w)[{letters[0]}-{letters[-1]}](?![\w'’])", given)
    return found[-1] if found else None


def _own_pattern(row: Row) -> "regex.Pattern[str]":
    pattern = row.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        raise RowError(f"pattern is {pattern!r}, expected a regular expression")
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise RowError(f"pattern is {pattern!r:.200}, no regular expression: {error}") from None


def _matches(answer: str, pattern: "regex.Pattern[str]", row: Row) -> bool:
    try:
        return pattern.search(answer, timeout=PATTERN_LIMIT_S) is not None
    except TimeoutError:
        return False


WAYS: Mapping[str, tuple[Callable[[Row], Any], Callable[[str, Any, Row], bool]]] = {
    "exact": (lambda row: _words(_answer(row)), lambda answer, own, row: _words(answer) == own),
    "number": (_own_number, lambda answer, own, row: number_in(answer) == own),
    "choice": (_own_choice, lambda answer, own, row: choice_in(answer, row) == own),
    "regex": (_own_pattern, _matches),
}

__all__ = ["RowError", "Score", "ScoreError", "asked", "choice_in", "make_score", "number_in"]
