"""The process of one rank of the learner above 0.

    python -m openenv_pipe.learner.distributed.worker SOCKET RANK SIZE DEVICE NUM_THREADS

It connects to the unix socket SOCKET and executes the orders that rank 0 sends, until rank 0 closes
the connection. Its output is its log. Rank 0 alone plays episodes and writes checkpoints.
"""

import operator
import shutil
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from openenv_pipe.config.schema import ModelConfig, RunConfig
from openenv_pipe.learner.distributed.fsdp import ShardedPolicy
from openenv_pipe.learner.distributed.learner_group import StateLayout, build_rank
from openenv_pipe.learner.distributed.publication import ShardedPublication
from openenv_pipe.learner.distributed.sharded_learner import ShardedLearner, ShardedWarmStart
from openenv_pipe.learner.distributed.sharded_load import load_sharded_policy
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.ranks import Ranks
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.policy import Policy
from openenv_pipe.system.malloc import keep_freed_memory
from openenv_pipe.types import Sample


class Worker:
    """Executes rank 0's orders: a method of its own, or of an object that it has built before."""

    policy: ShardedPolicy  # of a sharded policy, as the objects below
    learner: ShardedLearner
    warm_start: ShardedWarmStart
    publication: ShardedPublication
    optimizer: Optimizer  # of the stage that was built last

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._policy: Policy  # whole
        self._config: RunConfig
        self._learner: Learner

    def join(self, rendezvous: Path) -> None:
        self._ranks.join(rendezvous, self._device)

    def load(self, config: RunConfig) -> None:
        self._config = config
        self._policy = load_policy(config.model, seed=config.seed, device=self._device)

    def receive_state(self, layout: StateLayout) -> None:
        reference = layout.receive(self._policy, self._ranks)
        self._learner = build_rank(self._policy, self._config, self._ranks, reference)
        optimizer, device = self._learner.optimizer, self._policy.device
        layout.broadcast_optimizer(optimizer, self._ranks, device)

    def update(self, samples: Sequence[Sample], step: int) -> None:
        self._learner.update(samples, step)

    def load_sharded(
        self, config: ModelConfig, seed: int, num_replicas: int, checkpoint: Path | None
    ) -> None:
        self.policy = load_sharded_policy(
            config,
            seed=seed,
            device=self._device,
            ranks=self._ranks,
            num_replicas=num_replicas,
            checkpoint=checkpoint,
        )
        self.publication = ShardedPublication(self.policy, self._ranks)

    def build_learner(self, config: RunConfig) -> None:
        self.learner = ShardedLearner(self.policy, config, self._ranks)
        self.optimizer = self.learner.optimizer

    def build_warm_start(self, config: RunConfig) -> None:
        self.warm_start = ShardedWarmStart(self.policy, config, self._ranks)
        self.optimizer = self.warm_start.optimizer


def main() -> None:
    socket_path, rank, size, device, num_threads = sys.argv[1:]
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    torch.set_num_threads(int(num_threads))
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    keep_freed_memory()
    ranks = Ranks(int(rank), int(size))
    worker = Worker(ranks, torch.device(device))
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(socket_path)
        connection = Connection(connected.detach())
    with connection:
        connection.send(ranks.rank)
        while True:
            try:
                order, arguments = connection.recv()
            except (EOFError, ConnectionError):
                break  # rank 0 has ended, so this process ends too
            operator.attrgetter(order)(worker)(*arguments)
            connection.send(order)
    ranks.leave()
    shutil.rmtree(Path(socket_path).parent, ignore_errors=True)  # rank 0 may have been killed


if __name__ == "__main__":
    main()
