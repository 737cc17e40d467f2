"""The rules of Echo as pure functions: the letters of a task, and the score of a message.

Partial credit gives even a random model some reward: random bytes earn about 0.02, any lowercase
letters 0.2 or more, and always the same one of the five letters 0.36. Only a player that reads the
requested letter earns 1.0.
"""

import random

LETTERS = "abcde"
OTHER_LETTER_SHARE = 0.2
MAX_TURNS = 8
NUM_TASKS = {"train": 400, "eval": 100}


class TaskError(ValueError, IndexError):
    """A split, index, seed or number of turns that does not exist.

    It is a ValueError for callers of `reset`, and an IndexError because OpenEnv's task routes
    answer that with status 400 instead of 500.
    """


def score(message: str, letter: str) -> float:
    """Return the mean value of the message's characters, 0.0 to 1.0; 0.0 for an empty message.

    A character counts 1.0 if it is `letter`, `OTHER_LETTER_SHARE` if it is another lowercase
    letter a to z, and 0.0 otherwise, spaces and capitals included.
    """
    if not message:
        return 0.0
    num_right = message.count(letter)
    num_lowercase = sum("a" <= character <= "z" for character in message)
    return (num_right + OTHER_LETTER_SHARE * (num_lowercase - num_right)) / len(message)


def choose_letters(split: str, index: int | None, seed: int | None) -> str:
    """Return the `MAX_TURNS` letters of a task, one for each turn.

    They are given by `index`, else by `seed`, else random. The first letter cycles with the
    index, so that each letter is first equally often. Raises TaskError if the split, index or
    seed does not exist.
    """
    num_tasks = count_tasks(split)
    if index is None:
        if seed is not None and type(seed) is not int:
            raise TaskError(f"seed must be an integer or null, got {seed!r}")
        return "".join(random.Random(seed).choices(LETTERS, k=MAX_TURNS))
    if type(index) is not int or not 0 <= index < num_tasks:
        raise TaskError(
            f"index must be an integer from 0 to {num_tasks - 1} for split {split!r}, got {index!r}"
        )
    rest = random.Random(f"{split} {index}").choices(LETTERS, k=MAX_TURNS - 1)
    return LETTERS[index % len(LETTERS)] + "".join(rest)


def count_tasks(split: str) -> int:
    """Return the number of tasks of a split. Raises TaskError for an unknown split."""
    if split not in tuple(NUM_TASKS):  # A tuple, because a client may send unhashable values.
        raise TaskError(f"split must be one of {', '.join(NUM_TASKS)}, got {split!r}")
    return NUM_TASKS[split]
