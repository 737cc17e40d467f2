"""Scripted policies for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here a message.
"""

import random
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any


def perfect(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return the requested letter, which earns 1.0."""
    return observations[-1]["letter"]


def random_letters(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return eight random lowercase letters, which earn 0.23 on average."""
    return "".join(rng.choices(ascii_lowercase, k=8))


def beginner(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a call of the tool `say` with a random letter, or one time in three the right one."""
    letter = observations[-1]["letter"] if rng.random() < 1 / 3 else rng.choice(ascii_lowercase)
    return f'<tool_call>\n{{"name": "say", "arguments": {{"message": "{letter}"}}}}\n</tool_call>'
