"""Scripted policies for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here a program.
"""

import ast
import random
from collections.abc import Mapping, Sequence
from typing import Any

from .problems import SPLITS, problems

GUESSES = (
    "sum({0})",
    "len({0})",
    "max({0})",
    "min({0})",
    "sorted({0})",
    "sorted({0}, reverse=True)",
    "list(reversed({0}))",
    "{0}",
    "{0}.upper()",
    "{0}.split()",
    "len({0}.split())",
    "{0}.title()",
    "str({0})",
    "{0} + {1}",
    "max({0}, {1})",
    "{0} * 2",
    "{0} % 2 == 0",
    "{0} + 1",
    "bool({0})",
    "[]",
    "0",
)


def reference(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return the reference solution, which earns 1.0 and which an honest player cannot know."""
    wanted = observations[-1]["signature"], observations[-1]["statement"]
    for split in SPLITS:
        for problem in problems(split):
            if (problem.signature, problem.statement) == wanted:
                return problem.solution
    raise ValueError(f"no problem {wanted}")


def from_examples(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return an untried one-line guess that agrees with both examples, or else any untried guess.

    This measures how much reward is possible without reading the statement.
    """
    first, last = observations[0], observations[-1]
    guesses = _guesses(first["signature"])
    fitting = [guess for guess in guesses if _fits(guess, first)]
    others = [guess for guess in guesses if guess not in fitting]
    rng.shuffle(others)
    ranked = fitting + others
    return f"{first['signature']}\n    return {ranked[last['attempt'] % len(ranked)]}\n"


def random_guess(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a random one-line guess without looking at the examples."""
    signature = observations[-1]["signature"]
    return f"{signature}\n    return {rng.choice(_guesses(signature))}\n"


def _guesses(signature: str) -> list[str]:
    names = _arguments(signature)
    return [guess.format(*names, *names) for guess in GUESSES]


def _arguments(signature: str) -> list[str]:
    function = ast.parse(signature + " ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return [argument.arg for argument in function.args.args]


def _fits(guess: str, observation: Mapping[str, Any]) -> bool:
    return all(_agrees(guess, observation, example) for example in observation["examples"])


def _agrees(guess: str, observation: Mapping[str, Any], example: Mapping[str, str]) -> bool:
    call = ast.parse(example["call"], mode="eval").body
    assert isinstance(call, ast.Call)
    values = [ast.literal_eval(argument) for argument in call.args]
    names = _arguments(observation["signature"])
    try:
        return repr(eval(guess, dict(zip(names, values, strict=True)))) == example["result"]
    except (TypeError, ValueError, AttributeError):
        return False
