"""The problems, their tests and their splits; a task is (split, index).

A problem is one value of one family's parameter. Their order is that of the SHA-256 of their
names, which needs no seed and never changes; the last quarter is `eval`. Tests come from a
generator that is seeded with the problem's name, and from the family's reference function.
"""

import hashlib
import random
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from .families import lists, mappings, numbers, strings
from .families.family import FAMILIES, Family

THEMES = (numbers, lists, strings, mappings)  # importing them has filled FAMILIES
SPLITS = ("train", "eval")
EVAL_SHARE = 0.25
NUM_EXAMPLES, NUM_HIDDEN = 2, 20
MAX_EQUAL = 14  # tests of a problem with the same answer: a constant must not earn much
MAX_DRAWS = 10_000
WORDS = ("an", "ant", "apple", "banana", "bee", "blue", "eagle", "green", "moon", "otter", "stone")


class TaskError(ValueError, IndexError):
    """A split, index, seed or number of attempts that does not exist.

    It is a ValueError for callers of `reset`, and an IndexError because OpenEnv's task routes
    answer that with status 400 instead of 500.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A call and what it has to return."""

    arguments: list[Any]
    expected: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One function to write."""

    family: Family
    value: Any

    @property
    def name(self) -> str:
        return f"{self.family.name}/{self.value!r}"

    @property
    def function(self) -> str:
        return self.family.name

    @property
    def statement(self) -> str:
        return self.family.statement(self.value)

    @property
    def signature(self) -> str:
        return self.family.signature()

    @property
    def solution(self) -> str:
        """A submission that passes. Not for players."""
        return self.family.solution(self.value)

    def tests(self) -> tuple[list[Case], list[Case]]:
        """The visible examples and the hidden tests; no two have the same arguments."""
        return _tests(self.name)


def problems(split: str) -> tuple[Problem, ...]:
    """The problems of one split in task order; raises TaskError for an unknown split."""
    if split not in SPLITS:
        raise TaskError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    ordered = tuple(_by_name().values())
    num_train = len(ordered) - round(len(ordered) * EVAL_SHARE)
    return ordered[:num_train] if split == "train" else ordered[num_train:]


def num_tasks(split: str) -> int:
    """How many tasks a split has: valid indices are 0 up to this, exclusive."""
    return len(problems(split))


def choose_problem(split: str, index: int | None, seed: int | None) -> Problem:
    """The problem of a task: by `index`, else by `seed`, else random.

    Raises TaskError where a split, index or seed does not exist.
    """
    choices = problems(split)
    if index is None:
        if seed is not None and type(seed) is not int:
            raise TaskError(f"seed must be an integer or null, got {seed!r}")
        return random.Random(seed).choice(choices)
    if type(index) is not int or not 0 <= index < len(choices):
        raise TaskError(
            f"index must be an integer from 0 to {len(choices) - 1} for split {split!r}, "
            f"got {index!r}"
        )
    return choices[index]


@cache
def _by_name() -> dict[str, Problem]:
    every = [Problem(family=family, value=value) for family in FAMILIES for value in family.values]
    every.sort(key=lambda problem: hashlib.sha256(problem.name.encode()).digest())
    return {problem.name: problem for problem in every}


@cache
def _tests(name: str) -> tuple[list[Case], list[Case]]:
    problem, rng = _by_name()[name], random.Random(name)
    types = problem.family.argument_types().values()
    drawn: dict[str, Case] = {}
    answers: Counter[str] = Counter()
    for _ in range(MAX_DRAWS):
        test = _test(problem, [_draw(type_, rng) for type_ in types])
        answer = repr(test.expected)
        if repr(test.arguments) not in drawn and answers[answer] < MAX_EQUAL:
            drawn[repr(test.arguments)] = test
            answers[answer] += 1
        if len(drawn) == NUM_EXAMPLES + NUM_HIDDEN:
            tests = list(drawn.values())
            return tests[:NUM_EXAMPLES], tests[NUM_EXAMPLES:]
    raise ValueError(f"the answers of problem {name} hardly vary")


def _test(problem: Problem, arguments: list[Any]) -> Case:
    family = problem.family
    expected = family.reference(*arguments, **{family.parameter: problem.value})
    return Case(arguments=arguments, expected=expected)


def _draw(type_: Any, rng: random.Random) -> Any:
    """A random argument of an annotated type; values are small, so that they repeat."""
    words = rng.choices(WORDS, k=rng.randint(0, 7))
    if type_ is int:
        return rng.randint(0, 60)
    if type_ is str:
        return " ".join(words)
    if type_ == list[str]:
        return words
    if type_ == list[int]:
        spread = rng.choice((2, 9))
        return [rng.randint(-spread, spread) for _ in range(rng.randint(0, 9))]
    if type_ == dict[str, int]:
        return {word: rng.randint(0, 9) for word in words}
    raise TypeError(f"no arguments of type {type_} can be drawn")
