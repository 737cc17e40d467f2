"""The rules as pure functions: what a task asks, and what an answer earns. Put your own here.

A letter from a to e is shown, and the answer is its place in the alphabet, 1 to 5; four times in
an episode. The reward is a ladder that even a random model stands on: any digit earns a little.
"""

import hashlib
import random
from functools import cache
from itertools import product

LETTERS = "abcde"
NUM_TURNS = 4
EVAL_SHARE = 0.2
SPLITS = ("train", "eval")
DIGIT_SHARE = 0.2  # of what the right digit earns, for any other
DIGITS = "0123456789"


class TaskError(ValueError, IndexError):
    """A split, index or seed that does not exist.

    It is a ValueError for who calls `reset`, and an IndexError because that is what OpenEnv's
    task routes answer with status 400 instead of 500.
    """


def place(letter: str) -> str:
    """The right answer."""
    return str(LETTERS.index(letter) + 1)


def score(answer: str, letter: str) -> float:
    """The mean over the answer's characters, from 0.0 to 1.0; 0.0 for an empty answer.

    A character counts 1.0 where it is the right digit, `DIGIT_SHARE` where it is another, and 0.0
    for anything else.
    """
    if not answer:
        return 0.0
    num_right = answer.count(place(letter))
    num_digits = sum(character in DIGITS for character in answer)
    return (num_right + DIGIT_SHARE * (num_digits - num_right)) / len(answer)


def choose_task(split: str, index: int | None, seed: int | None) -> str:
    """A task of the split, the letters of its turns: by `index`, else by `seed`, else random.

    Raises TaskError where one of them does not exist.
    """
    choices = tasks(split)
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


def tasks(split: str) -> tuple[str, ...]:
    """The tasks of a split; the two share none. Raises TaskError for an unknown split."""
    if split not in SPLITS:
        raise TaskError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    every = _shuffled()
    num_train = round(len(every) * (1.0 - EVAL_SHARE))
    return every[:num_train] if split == "train" else every[num_train:]


@cache
def _shuffled() -> tuple[str, ...]:
    """All tasks in the order of their hashes, which needs no seed and never changes."""
    every = map("".join, product(LETTERS, repeat=NUM_TURNS))
    return tuple(sorted(every, key=lambda task: hashlib.sha256(task.encode()).digest()))
