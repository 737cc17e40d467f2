"""Scripted policies of both players, called with all observations and a random generator."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from .game import LETTERS, MAX_LENGTH, PROPOSER


def beginner(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Propose a word of any length, and write backwards with seven of ten letters right."""
    if observations[-1]["turn"] == PROPOSER:
        return _draw(rng.randint(1, MAX_LENGTH), rng)
    word = observations[-1]["word"]
    return "".join(
        letter if rng.random() < 0.7 else rng.choice(LETTERS) for letter in reversed(word)
    )


def longest(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Propose a word of eight letters, and write every word backwards."""
    if observations[-1]["turn"] == PROPOSER:
        return _draw(MAX_LENGTH, rng)
    return str(observations[-1]["word"][::-1])


def _draw(length: int, rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=length))
