"""The splits, and the random generator of each task."""

import random

NUM_TASKS = {"train": 10_000, "eval": 1_000}


class TaskError(ValueError, IndexError):
    """A split, index, seed or limit that does not exist.

    It is a ValueError for callers of `reset`, and an IndexError because OpenEnv's task routes
    answer that with status 400 instead of 500.
    """


def chance_of(split: str, index: int | None, seed: int | None) -> random.Random:
    """Return the generator of all random draws of a task, seeded by `index`, else by `seed`.

    Without either, the seed is random. No two splits share a generator, whatever the index or seed.
    Raises TaskError if the split, index or seed does not exist.
    """
    num_tasks = count_tasks(split)
    if index is None and seed is None:
        return random.Random()
    if index is None:
        require_integer("seed", seed)
        return random.Random(f"{split} seed {seed}")
    require_integer("index", index, 0, num_tasks - 1)
    return random.Random(f"{split} index {index}")


def count_tasks(split: str) -> int:
    """Return the number of tasks of a split. Raises TaskError for an unknown split."""
    if split not in tuple(NUM_TASKS):  # A tuple, because a client may send unhashable values.
        raise TaskError(f"split must be one of {', '.join(NUM_TASKS)}, got {split!r}")
    return NUM_TASKS[split]


def require_integer(
    what: str, value: object, low: int | None = None, high: int | None = None
) -> None:
    """Raise TaskError unless `value` is an int (not a bool) from `low` to `high`."""
    if type(value) is not int:
        raise TaskError(f"{what} must be an integer, got {value!r}")
    if low is not None and high is not None and not low <= value <= high:
        raise TaskError(f"{what} must be an integer from {low} to {high}, got {value!r}")
