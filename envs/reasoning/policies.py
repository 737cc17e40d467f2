"""Scripted policies, for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`; it returns the text that a model would write: here, the answer. The observation
has no answer in it, so none of these is an oracle: they guess.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any


def constant(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Always 0."""
    return "0"


def number_of_question(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """One of the whole numbers that stand in the question, or 0."""
    return rng.choice(re.findall(r"\d+", observations[0]["question"]) or ["0"])
