"""The problems, their tests and their splits; a task is (split, index).

A problem is one value of one family's parameter. Problems are sorted by the SHA-256 of their
names, so the order needs no seed and never changes; the last quarter is `eval`. A generator seeded
with the problem's name draws the arguments of the tests; the reference function gives the results.
"""

import hashlib
import random
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from .families import lists, mappings, numbers, strings
from .families.family import FAMILIES, Family

THEMES = (numbers, lists, strings, mappings)  # importing these modules fills FAMILIES
SPLITS = ("train", "eval")
EVAL_SHARE = 0.25
NUM_EXAMPLES, NUM_HIDDEN = 2, 20
MAX_EQUAL = 14  # tests of a problem with the same answer, so that a constant earns little
MAX_DRAWS = 10_000
WORDS = ("an", "ant", "apple", "banana", "bee", "blue", "eagle", "green", "moon", "otter", "stone")


class TaskError(ValueError, IndexError):
    """A split, index, seed or number of attempts that does not exist.

    It is a ValueError for callers of `reset`, and an IndexError because OpenEnv's task routes
    answer that with status 400 instead of 500.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The arguments of a call and the value that it must return."""

    arguments: list[Any]
    expected: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One task: a function to write."""

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
        """Return a submission that passes all tests; players must not see it."""
        return self.family.solution(self.value)

    def tests(self) -> tuple[list[Case], list[Case]]:
        """Return the visible examples and the hidden tests; no two have the same arguments."""
        return _tests(self.name)


def problems(split: str) -> tuple[Problem, ...]:
    """Return the problems of one split in task order. Raises TaskError for an unknown split."""
    if split not in SPLITS:
        raise TaskError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    ordered = tuple(_by_name().values())
    num_train = len(ordered) - round(len(ordered) * EVAL_SHARE)
    return ordered[:num_train] if split == "train" else ordered[num_train:]


def num_tasks(split: str) -> int:
    """Return the number of tasks of a split; valid indices are 0 to this number, exclusive."""
    return len(problems(split))


def choose_problem(split: str, index: int | None, seed: int | None) -> Problem:
    """Return the problem of a task: by `index`, else by `seed`, else random.

    Raises TaskError if the split, index or seed does not exist.
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
    """Draw a random argument of an annotated type. Values are small, so that they repeat."""
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
