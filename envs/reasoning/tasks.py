"""Questions of reasoning-gym by task, split and index, and their scores.

A task is the name of one of the library's generators, such as `leg_counting`. The splits use
different seeds, so that no question of `eval` is drawn with a seed of `train`. A task with few
different questions asks the same in both splits, unless `holdout` keeps a share of them for `eval`.
"""

import hashlib
import json
import math
import os
import random
from collections.abc import Mapping
from functools import lru_cache
from threading import Lock
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.factory import ProceduralDataset as Dataset

DEFAULT_TASK = "leg_counting"
DEFAULT_SIZE = 1000
MAX_SIZE = 2**20
MAX_ANSWER_LENGTH = 10_000
DRAWS = 50  # for each question of a split with `holdout`; after them it counts as exhausted
# The library adds a question's index to the seed; these seeds differ by more than any split's size.
SPLIT_SEEDS = {"train": 0, "eval": 2**31}
# The scorers of these tasks run the player's text as Python, by `eval` or by sympy's parser.
EVALUATING_TASKS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
ALLOW_EVAL = "REASONING_ALLOW_EVAL"
_lock = Lock()


class TaskError(ValueError, IndexError):
    """A task, split, index, seed, size or config that does not exist.

    It is a ValueError for callers of `reset`, and an IndexError because OpenEnv's task routes
    answer that with status 400 instead of 500.
    """


class Question:
    """One question, its generator's scorer, and what the scorer compares with."""

    def __init__(self, dataset: Dataset, index: int) -> None:
        """Generate the question. Raises TaskError if the generator fails with this config."""
        self._dataset = dataset
        try:
            self._entry = dataset[index]
        except Exception as error:  # A generator may raise anything for unexpected settings.
            raise TaskError(f"config: question {index} cannot be made: {error!r}") from error

    @property
    def text(self) -> str:
        """Return the question's text."""
        return self._entry["question"]

    def score(self, answer: str) -> float:
        """Return the library's score, 1.0 for a right answer, or 0.0 if the scorer fails on it."""
        if len(answer) > MAX_ANSWER_LENGTH:
            return 0.0
        try:
            score = float(self._dataset.score_answer(answer=answer, entry=self._entry))
        except Exception:  # Some scorers fail on malformed answers.
            return 0.0
        return score if math.isfinite(score) else 0.0


def choose_question(
    task: str,
    split: str,
    index: int | None,
    seed: int | None,
    size: int = DEFAULT_SIZE,
    config: Mapping[str, Any] | None = None,
    holdout: float = 0.0,
) -> Question:
    """Return the question of a task: by `index`, else by `seed`, else random.

    holdout: the share of all questions that only `eval` asks; then each index is another question.

    Raises TaskError if the task, split, index, seed, size, config or holdout does not exist.
    """
    _require_task(task)
    require_split(split)
    _require_integer("size", size, 1, MAX_SIZE)
    if index is None:
        if seed is not None and type(seed) is not int:
            raise TaskError(f"seed must be an integer or null, got {seed!r}")
        index = random.Random(seed).randrange(size)
    _require_integer("index", index, 0, size - 1)
    if type(holdout) not in (int, float) or not 0 <= holdout < 1:
        raise TaskError(f"holdout must be a share from 0 to below 1, got {holdout!r}")
    text = _as_text(config or {})
    if not holdout:
        return Question(_load(task, split, size, text), index)
    with _lock:  # else all sessions that begin at once look for the same questions
        indices = _held_out(task, size, text, holdout)[split]
    if index >= len(indices):
        raise TaskError(
            f"index: task {task!r} with config {text} and holdout {holdout} has only "
            f"{len(indices)} different questions for {split}, so there is no index {index}"
        )
    return Question(_load(task, "train", size, text), indices[index])


def require_split(split: object) -> None:
    """Raise TaskError for an unknown split."""
    if split not in tuple(SPLIT_SEEDS):  # A tuple, because a client may send unhashable values.
        raise TaskError(f"split must be one of {', '.join(SPLIT_SEEDS)}, got {split!r}")


def _require_task(task: object) -> None:
    if task not in tuple(DATASETS):
        raise TaskError(
            f"task must be one of reasoning-gym's {', '.join(sorted(DATASETS))}; got {task!r}"
        )
    if task in EVALUATING_TASKS and os.environ.get(ALLOW_EVAL) != "1":
        raise TaskError(
            f"task {task!r} is rejected: its scorer runs answers as Python; where players may do "
            f"that, as in a container of their own, start the server with {ALLOW_EVAL}=1"
        )


def _require_integer(what: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise TaskError(f"{what} must be an integer from {low} to {high}, got {value!r}")


def _as_text(config: object) -> str:
    """Return the overrides as JSON, which serves as a cache key."""
    if not isinstance(config, Mapping) or {"seed", "size"} & set(config):
        raise TaskError(f"config must map keys other than seed and size, got {config!r}")
    return json.dumps(config, sort_keys=True)


@lru_cache(maxsize=128)
def _held_out(task: str, size: int, config: str, holdout: float) -> dict[str, list[int]]:
    """Return the indices of each split's different questions, at most `size` of them.

    A hash of a question's text assigns it to a split.
    """
    dataset = _load(task, "train", size, config)
    seen: set[str] = set()
    found: dict[str, list[int]] = {split: [] for split in SPLIT_SEEDS}
    for index in range(DRAWS * size):
        text = Question(dataset, index).text
        if text in seen:
            continue
        seen.add(text)
        part = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
        mine = found["eval" if part < holdout else "train"]
        if len(mine) < size:
            mine.append(index)
        if all(len(each) == size for each in found.values()):
            break
    return found


@lru_cache(maxsize=128)  # Some generators read files at construction, which takes a second or two.
def _load(task: str, split: str, size: int, config: str) -> Dataset:
    try:
        return create_dataset(task, seed=SPLIT_SEEDS[split], size=size, **json.loads(config))
    except Exception as error:  # AssertionError for bad values, TypeError for unknown keys.
        raise TaskError(f"config {config} does not suit task {task!r}: {error}") from error
