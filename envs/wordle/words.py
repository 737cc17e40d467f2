"""The shipped word lists, their train and eval splits, and the answer of each task.

A task is (split, index). A list's tasks are sorted by the SHA-256 of their words, so the order
needs no seed and never changes. With `holdout` the last fifth is `eval` and the rest is `train`.
Without it both splits use every word as an answer, as in the real game, whose players know the
list. All words of a list may be guessed in both splits. `data/README.md` names the sources of the
lists.
"""

import hashlib
import random
from functools import cache
from pathlib import Path

LISTS = ("tiny60", "common250", "common1000", "full")
DEFAULT_LIST = "common250"
SPLITS = ("train", "eval")
EVAL_SHARE = 0.2

_DATA = Path(__file__).parent / "data"


class TaskError(ValueError, IndexError):
    """A list, split, index or seed that does not exist.

    It is a ValueError for callers of `reset`, and an IndexError because OpenEnv's task routes
    answer that with status 400 instead of 500.
    """


def load(words: str) -> tuple[str, ...]:
    """Return all words of the list `words`, sorted. Raises TaskError for an unknown list."""
    _require_member("words", words, LISTS)
    return _read(words)


@cache
def legal_guesses(words: str) -> frozenset[str]:
    """Return the words of the list `words` as a set, for membership tests."""
    return frozenset(load(words))


def answers(split: str, words: str = DEFAULT_LIST, holdout: bool = True) -> tuple[str, ...]:
    """Return the answers of one split in task order; a task's index is its answer's position.

    Raises TaskError for an unknown split or list.
    """
    _require_member("split", split, SPLITS)
    _require_member("words", words, LISTS)
    _require_member("holdout", holdout, (True, False))
    train, held_out = _train_and_held_out(words)
    if not holdout:
        return train + held_out
    return train if split == "train" else held_out


def num_tasks(split: str, words: str = DEFAULT_LIST, holdout: bool = True) -> int:
    """Return the number of tasks of a split; valid indices are 0 to this number, exclusive."""
    return len(answers(split, words, holdout))


def choose_answer(
    split: str, words: str, index: int | None, seed: int | None, holdout: bool = True
) -> str:
    """Return the answer of a task: by `index`, else by `seed`, else random.

    Raises TaskError if the list, split, index or seed does not exist.
    """
    choices = answers(split, words, holdout)
    if index is None:
        if seed is not None and type(seed) is not int:
            raise TaskError(f"seed must be an integer or null, got {seed!r}")
        return random.Random(seed).choice(choices)
    if type(index) is not int or not 0 <= index < len(choices):
        raise TaskError(
            f"index must be an integer from 0 to {len(choices) - 1} for split {split!r} "
            f"of words {words!r}, got {index!r}"
        )
    return choices[index]


def _require_member(what: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise TaskError(f"{what} must be one of {', '.join(map(str, known))}, got {value!r}")


@cache
def _read(words: str) -> tuple[str, ...]:
    return tuple((_DATA / f"{words}.txt").read_text("ascii").split())


@cache
def _train_and_held_out(words: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    shuffled = sorted(_read(words), key=lambda word: hashlib.sha256(word.encode()).digest())
    num_train = len(shuffled) - round(len(shuffled) * EVAL_SHARE)
    return tuple(shuffled[:num_train]), tuple(shuffled[num_train:])
