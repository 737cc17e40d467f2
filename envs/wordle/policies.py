"""Scripted policies for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here a guess. A policy knows what a
player knows, which includes the word list.
"""

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from . import rules
from .words import load


def consistent(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a random word of the list that agrees with every row of the board.

    Raises ValueError if no word of the list agrees with the board.
    """
    words, board = observations[-1]["words"], observations[-1]["board"]
    if not board:
        return rng.choice(load(words))
    first, *rest = board
    candidates = _answers_by_marks(words, first["guess"]).get(first["marks"], [])
    candidates = [word for word in candidates if rules.consistent(word, rest)]
    if not candidates:
        raise ValueError(f"no word of {words!r} fits the board {board}")
    return rng.choice(candidates)


def random_word(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a random word of the list, ignoring the board."""
    return rng.choice(load(observations[-1]["words"]))


# Only the first row is cached, because it rules out most words. The cache is bounded, because all
# guesses of the largest list would take about 200 MB.
@lru_cache(maxsize=2048)
def _answers_by_marks(words: str, guess: str) -> dict[str, list[str]]:
    """Return the words of the list, grouped by the marks of `guess` if that word is the answer."""
    answers: dict[str, list[str]] = {}
    for answer in load(words):
        answers.setdefault(rules.score(guess, answer), []).append(answer)
    return answers
