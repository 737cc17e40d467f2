"""The ranks of an update: processes that compute a part of it each, and then know the same sums.

All of them do the same things in the same order; this is the only place where they talk to each
other while they do. Refused here: more than one machine, and starting or ending processes.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from openenv_pipe.learner.accumulator import MetricAccumulator

Item = TypeVar("Item")
LONGEST_WAIT = timedelta(minutes=10)  # for the slowest of the others
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Ranks:
    """One process's view of them: which it is, and what it shares with the others.

    Of a single one nothing is sent, and nothing is different from there being none.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def join(self, rendezvous: Path, device: torch.device) -> None:
        """Finds the others through a file that is there for nothing else. Blocks until all are
        there; no port is open to other machines."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(str(rendezvous), self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=LONGEST_WAIT,
        )

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def assign_rows(self, rows: Sequence[Item]) -> list[tuple[Item, bool]]:
        """This rank's rows, and whether each counts: all ranks get equally many, because shards of
        a model are gathered by all at once; where rows are missing, one is computed for nothing."""
        mine = [(row, True) for row in rows[self.rank :: self.size]]
        most = -(-len(rows) // self.size)
        return mine + [(row, False) for row in rows[: most - len(mine)]]

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Each gradient becomes the sum of all ranks'. Those of shards are that already."""
        whole = [values for values in parameters if not isinstance(values, DTensor)]
        if self.size == 1 or not whole:
            return
        has_gradient = torch.tensor([values.grad is not None for values in whole]).int()
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        learned = [
            values for values, some in zip(whole, has_gradient.tolist(), strict=True) if some
        ]
        for values in learned:
            if values.grad is None:
                values.grad = torch.zeros_like(values)
        sums = [dist.all_reduce(values.grad, async_op=True) for values in learned]
        for work in sums:
            work.wait()

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Of all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def merge(self, accumulator: MetricAccumulator) -> None:
        """Make the accumulator hold what all ranks have counted, the same on each."""
        if self.size == 1:
            return
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, accumulator.values())
        accumulator.replace(parts)

    def broadcast(self, values: torch.Tensor) -> None:
        """Every rank's tensor becomes rank 0's."""
        dist.broadcast(values, src=0)


SINGLE_RANK = Ranks()
