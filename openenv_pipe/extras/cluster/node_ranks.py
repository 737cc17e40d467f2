"""The ranks of the learner on other nodes of a Ray cluster, as seen from rank 0.

Each works in a process that Ray places and that ends with this one. Orders go
through Ray, tensors through torch.distributed between the nodes.
"""

import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from openenv_pipe.errors import ConfigError, HostError, PipeError, RankLostError, TrainingError
from openenv_pipe.extras.cluster.nodes import (
    Nodes,
    PlacedCall,
    PlacedProcess,
    Reservation,
    WorkerLostError,
)
from openenv_pipe.extras.cluster.schema import RayClusterConfig
from openenv_pipe.learner.devices import LONGEST_WAIT
from openenv_pipe.registry import load

START_LIMIT_S = 300.0  # for all ranks to import torch
POLL_S = 1.0


class RayRanks:
    """Places ranks on other nodes, commands and ends them. It is a `learner.devices.NodeRanks`.

    `trainer.devices` ranks are divided equally over `cluster.learner_nodes` nodes. The first of
    these is this machine, whose ranks are not placed by Ray.
    """

    def __init__(
        self, settings: RayClusterConfig, device: torch.device, shared: Path | None = None
    ) -> None:
        """Prepare the ranks without starting them. shared: a folder that all nodes need."""
        self._settings = settings
        self._device = device
        self._shared = shared
        self._cluster: Nodes | None = None
        self._reservation: Reservation | None = None
        self._ranks: dict[int, PlacedProcess] = {}
        self._node_names: dict[int, str] = {}  # of each rank
        self._calls: dict[int, PlacedCall] = {}  # the last one of each rank
        self._is_closed = False

    @property
    def num_nodes(self) -> int:
        return self._settings.learner_nodes

    def start(self, worker: str, size: int, num_threads: int) -> None:
        """See `learner.devices.NodeRanks.start`. Waits `cluster.start_timeout_s` at most."""
        settings, per_node = self._settings, size // self.num_nodes
        num_gpus = 0.0 if self._device.type == "cpu" else 1.0
        self._cluster = Nodes(settings.address)
        self._reservation = self._cluster.reserve(
            self.num_nodes - 1,
            num_cpus=settings.cpus_per_rank * per_node,
            num_gpus=num_gpus * per_node,
        )
        self._wait_for_nodes(self._cluster, self._reservation, per_node)
        self._reject_closed()
        for rank in range(per_node, size):
            self._ranks[rank] = self._reservation.place(
                load(worker),
                *(rank, size, "cpu" if num_gpus == 0.0 else "cuda:0", num_threads, Path.cwd()),
                node=rank // per_node - 1,
                num_cpus=settings.cpus_per_rank,
                num_gpus=num_gpus,
                name=f"rank {rank} of trainer.devices={size}",
            )
        self._calls = {
            rank: process.begin("node", self._shared) for rank, process in self._ranks.items()
        }
        self._node_names = self._results("start", START_LIMIT_S)
        for rank, name in self._node_names.items():
            self._ranks[rank].name += f", on node {name},"

    def listen(self) -> socket.socket:
        assert self._cluster is not None
        address = (self._cluster.own_address(), 0)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return socket.create_server(address, family=family)

    def summary(self) -> str:
        """Return in words how many ranks are on which of the other nodes."""
        counts = Counter(self._node_names.values())
        return ", ".join(f"{number} on {name}" for name, number in counts.items())

    def send(self, order: str, arguments: Sequence[Any]) -> None:
        self._calls = {
            rank: process.begin("execute_or_end", order, arguments)
            for rank, process in self._ranks.items()
        }

    def wait_until_done(self, order: str) -> None:
        self._results(order, LONGEST_WAIT.total_seconds())

    def failure(self) -> PipeError | None:
        errors = []
        for call in self._calls.values():
            try:
                if call.is_over(0.0):
                    call.result()
            except PipeError as error:
                errors.append(error)
        errors.sort(key=lambda error: not isinstance(error, WorkerLostError))
        if not errors or isinstance(errors[0], ConfigError | TrainingError):
            return errors[0] if errors else None
        return RankLostError(str(errors[0]))

    def close(self) -> None:
        self._is_closed = True
        ranks, self._ranks, self._calls = self._ranks, {}, {}
        for process in ranks.values():
            process.kill()
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def _wait_for_nodes(self, cluster: Nodes, room: Reservation, per_node: int) -> None:
        settings = self._settings
        latest = time.monotonic() + settings.start_timeout_s
        while not room.is_ready(POLL_S):
            self._reject_closed()
            if time.monotonic() > latest:
                kind = "cores" if self._device.type == "cpu" else "GPUs"
                raise HostError(
                    f"cluster.learner_nodes={settings.learner_nodes}: the learner found no room "
                    f"within cluster.start_timeout_s={settings.start_timeout_s:g}: it needs "
                    f"{settings.learner_nodes - 1} nodes besides this machine, each with "
                    f"{per_node} {kind} that no rollout worker has (cluster.cpus_per_rank="
                    f"{settings.cpus_per_rank:g}), and {cluster.free_resources()}; add nodes, or "
                    "lower cluster.learner_nodes or cluster.rollout_workers"
                )

    def _reject_closed(self) -> None:
        if self._is_closed:
            raise TrainingError("the run has ended, and the learner's ranks with it")

    def _results(self, order: str, limit_s: float) -> dict[int, Any]:
        """Wait for all ranks' last call, and return what they returned."""
        latest = time.monotonic() + limit_s
        waiting = dict(self._calls)
        while waiting:
            self._reject_closed()
            rank, call = next(iter(waiting.items()))
            if call.is_over(POLL_S):
                del waiting[rank]
            if error := self.failure():
                raise error
            if time.monotonic() > latest:
                raise RankLostError(
                    f"{self._ranks[rank].name} has not finished {order!r} within {limit_s:g} s"
                )
        return {rank: call.result() for rank, call in self._calls.items()}
