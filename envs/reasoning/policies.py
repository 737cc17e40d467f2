"""Scripted policies for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here an answer. The observation
does not contain the right answer: two policies guess, and one computes sums.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any


def constant(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return 0 for every question."""
    return "0"


def number_of_question(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return one of the whole numbers in the question, or 0."""
    return rng.choice(re.findall(r"\d+", observations[0]["question"]) or ["0"])


def step_by_step(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return the solution of a `chain_sum`, rewritten term by term: 4 - 8 + 9 = -4 + 9 = 5.

    Raises ValueError for a question without a sum.
    """
    question = observations[0]["question"]
    found = re.search(r"-?\d+( [+-] -?\d+)*(?= =)", question)
    if found is None:
        raise ValueError(f"a sum of whole numbers was expected, got {question!r}")
    total, *rest = found.group().split()
    lines = [found.group()]
    while rest:
        sign, term, *rest = rest
        total = str(int(total) + int(term) * (1 if sign == "+" else -1))
        lines.append(" ".join([total, *rest]))
    return " = ".join(lines)
