"""Collective communication between the ranks of an update, on one machine.

All ranks execute the same program on different rows. `workers.py` starts and ends them.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from openenv_pipe.learner.accumulator import MetricAccumulator

Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
LONGEST_WAIT = timedelta(minutes=10)  # of a collective, for the slowest rank
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Ranks:
    """One rank and its collectives. With a world size of 1, every collective is a no-op."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def joined(self, order: str, *arguments: Any) -> AbstractContextManager[None]:
        """Let the other ranks do `order` while this rank does its part within the block.

        Only rank 0 of a sharded policy gives orders (`workers.LeadRanks`); others do nothing here.
        """
        return nullcontext()

    def join(self, rendezvous: Path, device: torch.device) -> None:
        """Join the process group through the file `rendezvous`; block until all ranks have joined.

        No port is open to other machines.
        """
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
        """Return this rank's rows, each with whether it counts.

        All ranks get the same number, because each forward pass of a sharded model is a
        collective; a rank with too few rows repeats rows that do not count.
        """
        mine = [(row, True) for row in rows[self.rank :: self.size]]
        most = -(-len(rows) // self.size)
        return mine + [(row, False) for row in rows[: most - len(mine)]]

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sum each gradient over all ranks. FSDP has already summed those of shards."""
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
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def merge(self, accumulator: MetricAccumulator) -> None:
        """Combine the accumulators of all ranks, with the same result on each."""
        if self.size > 1:
            accumulator.replace(self.gather(accumulator.values()))

    def gather(self, value: Item) -> list[Item]:
        """Return the values of all ranks, in the order of the ranks, on each of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrite every rank's tensor with rank 0's."""
        dist.broadcast(values, src=0)


SINGLE_RANK = Ranks()


def collective(
    owner: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Let all ranks call a method, with the same arguments, when rank 0 calls it.

    owner: the name of the method's object in `worker.Worker`. The object has its ranks in `_ranks`.
    """

    def decorated(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(method)
        def on_all_ranks(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            own: Any = arguments[0]
            order = f"{owner}.{method.__name__}"
            assert not options, "orders have arguments by position"
            with own._ranks.joined(order, *arguments[1:]):
                return method(*arguments, **options)

        return on_all_ranks

    return decorated
