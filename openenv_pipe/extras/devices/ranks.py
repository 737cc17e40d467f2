"""Collective communication between the ranks of an update. `workers.py` starts and ends them."""

import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from openenv_pipe.errors import TrainingError
from openenv_pipe.learner.accumulator import MetricAccumulator
from openenv_pipe.learner.devices import LONGEST_WAIT
from openenv_pipe.learner.ranks import Item, Ranks

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
POLL_S = 0.05
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
INTERFACE = "GLOO_SOCKET_IFNAME"  # which network interface gloo uses
Rendezvous = Path | tuple[str, int]  # a file on one machine, or address and port of rank 0


class ConnectedRanks(Ranks):
    """One rank of several, and its collectives."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._has_chosen_interface = False

    def join(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        listener: socket.socket | None = None,
        reject_lost: Callable[[], None] | None = None,
    ) -> None:
        """Join the process group through `rendezvous`; block until all ranks have joined.

        With a file, no port is open to other machines. On rank 0, listener: the socket at the
        rendezvous' address, where it tells the ranks of other nodes how to connect; reject_lost:
        raises an error if a rank is lost, and is called while others are on their way.
        """
        store: dist.Store
        if isinstance(rendezvous, Path):
            interface, store = LOOPBACK, dist.FileStore(str(rendezvous), self.size)
        else:
            host, port = rendezvous
            interface = interface_towards(host, port)
            store = dist.TCPStore(
                host,
                port,
                self.size,
                is_master=listener is not None,
                master_listen_fd=None if listener is None else listener.detach(),
                wait_for_workers=False,
                timeout=LONGEST_WAIT,
            )
        self._wait_for_others(store, reject_lost)
        if INTERFACE not in os.environ:
            self._has_chosen_interface = True
            os.environ[INTERFACE] = interface
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=LONGEST_WAIT,
        )

    def _wait_for_others(self, store: dist.Store, reject_lost: Callable[[], None] | None) -> None:
        """Announce that this rank is there; with `reject_lost`, wait until all are.

        `init_process_group` would wait up to LONGEST_WAIT for one that is lost.
        """
        store.set(f"here/{self.rank}", "")
        if reject_lost is None:
            return
        latest = time.monotonic() + LONGEST_WAIT.total_seconds()
        names = [f"here/{rank}" for rank in range(self.size)]
        while not store.check(names):
            reject_lost()
            if time.monotonic() > latest:
                raise TrainingError(f"the learner's ranks have not joined within {LONGEST_WAIT}")
            time.sleep(POLL_S)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._has_chosen_interface:
            self._has_chosen_interface = False
            del os.environ[INTERFACE]

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sum each gradient over all ranks. FSDP has already summed those of shards."""
        whole = [values for values in parameters if not isinstance(values, DTensor)]
        if not whole:
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
        dist.all_reduce(value)
        return value

    def merge(self, accumulator: MetricAccumulator) -> None:
        accumulator.replace(self.gather(accumulator.values()))

    def gather(self, value: Item) -> list[Item]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrite every rank's tensor with rank 0's."""
        dist.broadcast(values, src=0)


def interface_towards(host: str, port: int) -> str:
    """Return the network interface that has the address from which this machine reaches another."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # of a datagram socket: nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            return name
    return LOOPBACK


def try_collective(ranks: ConnectedRanks, device: torch.device, num_bytes: int) -> None:
    """Add up a tensor over all ranks and check the sum. A collective. Raises TrainingError."""
    values = torch.full((num_bytes // 4,), float(ranks.rank + 1), device=device)
    expected = ranks.size * (ranks.size + 1) / 2
    if not bool((ranks.sum(values) == expected).all()):
        raise TrainingError(
            f"rank {ranks.rank} of the learner received a wrong sum over {ranks.size} ranks; "
            "check the network between the nodes"
        )


def collective(owner: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
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
