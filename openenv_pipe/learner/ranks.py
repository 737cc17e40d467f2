"""The ranks of an update: one, which has nothing to communicate.

All ranks execute the same program on different rows. A subclass connects several.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from openenv_pipe.learner.accumulator import MetricAccumulator

Item = TypeVar("Item")


class Ranks:
    """One rank and its collectives, which do nothing where it is alone."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def joined(self, order: str, *arguments: Any) -> AbstractContextManager[None]:
        """Let the other ranks do `order` while this rank does its part within the block.

        Only rank 0 gives orders; others do nothing here.
        """
        return nullcontext()

    def assign_rows(self, rows: Sequence[Item]) -> list[tuple[Item, bool]]:
        """Return this rank's rows, each with whether it counts.

        All ranks get the same number, because each forward pass of a sharded model is a
        collective; a rank with too few rows repeats rows that do not count.
        """
        mine = [(row, True) for row in rows[self.rank :: self.size]]
        most = -(-len(rows) // self.size)
        return mine + [(row, False) for row in rows[: most - len(mine)]]

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sum each gradient over all ranks."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        return value

    def merge(self, accumulator: MetricAccumulator) -> None:
        """Combine the accumulators of all ranks, with the same result on each."""

    def gather(self, value: Item) -> list[Item]:
        """Return the values of all ranks, in the order of the ranks, on each of them."""
        return [value]


SINGLE_RANK = Ranks()
