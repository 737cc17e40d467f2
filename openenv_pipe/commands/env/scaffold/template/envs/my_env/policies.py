"""Scripted players, for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`; it returns the text that a model would write.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from .rules import DIGITS, place


def perfect(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """The letter's place: earns 1.0."""
    return place(observations[-1]["letter"])


def random_digit(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Any digit, whatever is shown."""
    return rng.choice(DIGITS)
