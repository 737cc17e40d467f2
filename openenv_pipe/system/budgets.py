"""How much of a run folder is read, whoever made it.

A few kilobytes may stand for gigabytes: a sparse file, a packed one, or JSON, whose values take up
to a hundred times the bytes of their text. Each limit is a multiple of what the largest runs write,
and what fits a limit takes less than 500 MB of memory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.errors import RunFolderError
from openenv_pipe.system.untrusted_json import levels

MAX_FILE_MB = 64  # of a file read whole; the largest image, 8.4 million pixels, has 34
MAX_DEPTH = 80  # levels of JSON; an observation has at most 64, and its episode a few more
MAX_UNPACKED_MB = 1024  # of a step's episodes; 1,000 of 32,000 tokens have half of it
# gzip saves 99 % of repetitive rows at best, and 99.9 % of what is made to be unpacked.
MAX_PACKING_RATIO = 200
FREE_UNPACKED_MB = 64  # of a file, before its ratio counts
MAX_ROWS = 100_000  # of a step's episodes, or of an evaluation's
MAX_TURNS = 10_000  # of an episode; a configuration allows no more, either
MAX_METRIC_NAMES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonBudget:
    """The most bytes and values of JSON: of one document, or of several that are kept at once."""

    max_mb: int
    max_values: int
    # of one object: pydantic makes a kilobyte of errors for each key that it does not know
    max_keys: int | None = None


# A configuration has at most 100,000 values, some of which are texts with commas.
RECORD = JsonBudget(max_mb=16, max_values=500_000, max_keys=10_000)
# A report of 10,000 tasks with 8 samples has 600,000 values.
REPORT = JsonBudget(max_mb=32, max_values=1_000_000, max_keys=10_000)
REPORTS = JsonBudget(max_mb=64, max_values=2_000_000)  # all reports of a run
EPISODE = JsonBudget(max_mb=32, max_values=2_000_000)  # a million tokens have half of each
METRICS_LINE = JsonBudget(max_mb=1, max_values=10_000)
METRICS = JsonBudget(max_mb=64, max_values=1_000_000)  # 10,000 steps of 100 metrics


class BudgetError(RunFolderError):
    """A file of a run folder has more than is read."""


class Account:
    """What is left of a budget for all documents that a reader keeps at once."""

    def __init__(self, budget: JsonBudget) -> None:
        self._budget = budget
        self._num_bytes = 0
        self._num_values = 0

    def spend(self, where: Path | str, content: bytes) -> None:
        """Count a document. Raises BudgetError if it is more than is left."""
        self._num_bytes += len(content)
        if self._num_bytes > self._budget.max_mb * 2**20:
            raise too_large(where, self._budget.max_mb)
        # At most this many, because a comma in a text counts, too.
        self._num_values += sum(map(content.count, (b",", b"[", b"{")))
        if self._num_values > self._budget.max_values:
            raise BudgetError(
                f"{where}, with what was read before it, has more than "
                f"{self._budget.max_values:,} values, the most that is read; is the file damaged, "
                "or made to fill the memory?"
            )


def check_shape(value: Any, max_keys: int | None) -> None:
    """Check the depth of a JSON value, and how many keys each object has. Raises ValueError."""
    for depth, level in enumerate(levels(value)):
        if depth == MAX_DEPTH:
            raise ValueError(f"it nests more than {MAX_DEPTH} levels deep")
        if max_keys and any(type(each) is dict and len(each) > max_keys for each in level):
            raise ValueError(f"an object in it has more than {max_keys:,} keys")


def too_large(where: Path | str, max_mb: int, what: str = "is larger than") -> BudgetError:
    return BudgetError(
        f"{where} {what} {max_mb:,} MB, the most that is read; is the file damaged, or made to "
        "fill the memory?"
    )
