"""The process of one rank of the learner above 0.

    python -m openenv_pipe.extras.devices.worker SOCKET RANK SIZE DEVICE NUM_THREADS

It connects to the unix socket SOCKET and executes the orders that rank 0 sends, until rank 0 closes
the connection. Its output is its log. Rank 0 alone plays episodes; unless the policy is sharded,
it also writes checkpoints alone.

On another machine, rank 0 calls the methods of a `Worker` instead (`workers.NodeRanks`).
"""

import operator
import os
import platform
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from openenv_pipe.config.schema import ModelConfig, RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.devices.fsdp import ShardedPolicy
from openenv_pipe.extras.devices.learner_group import ShardedLearner, ShardedWarmStart, StateLayout
from openenv_pipe.extras.devices.ranks import ConnectedRanks, Rendezvous, try_collective
from openenv_pipe.extras.devices.sharded_load import load_sharded_policy
from openenv_pipe.extras.devices.sharded_weights import ShardedPolicyWeights
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.seeding import use_deterministic_kernels
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.policy import Policy
from openenv_pipe.system.process_settings import keep_freed_memory

EXIT_DELAY_S = 1.0


class Worker:
    """Executes rank 0's orders: a method of its own, or of an object that it has built before."""

    learner: Learner
    policy: ShardedPolicy  # like the objects below, only if the policy is sharded
    warm_start: ShardedWarmStart
    weights: ShardedPolicyWeights
    optimizer: Optimizer  # of the stage that was built last

    def __init__(
        self, rank: int, size: int, device: str, num_threads: int, cwd: Path | None = None
    ) -> None:
        if cwd is not None and cwd.is_dir():
            os.chdir(cwd)  # relative paths of the configuration mean the same files
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        torch.set_num_threads(num_threads)
        use_deterministic_kernels()
        keep_freed_memory()
        self._ranks = ConnectedRanks(rank, size)
        self._device = torch.device(device)
        self._policy: Policy  # whole
        self._config: RunConfig

    def execute(self, order: str, arguments: Sequence[Any]) -> None:
        """Call a method by its name, or by an object's and its method's: `learner.update`."""
        operator.attrgetter(order)(self)(*arguments)

    def execute_or_end(self, order: str, arguments: Sequence[Any]) -> None:
        """Do as `execute`; after an error, end this process, so that no rank waits for it."""
        try:
            self.execute(order, arguments)
        except BaseException:
            threading.Timer(EXIT_DELAY_S, os._exit, (1,)).start()  # the caller gets the error first
            raise

    def node(self, shared: Path | None) -> str:
        """Return the name of this machine. The first call returns when torch is ready.

        shared: a folder that all nodes have to share. Raises ConfigError: this one does not.
        """
        if shared is not None and not shared.is_dir():
            raise ConfigError(
                f"the node {platform.node()} does not have {shared}: with trainer.parallel=fsdp "
                "all ranks write checkpoints; set runs_dir to a folder that all nodes share, or "
                "trainer.parallel=data"
            )
        return platform.node()

    def leave(self) -> None:
        self._ranks.leave()

    def join(self, rendezvous: Rendezvous) -> None:
        self._ranks.join(rendezvous, self._device)

    def try_collective(self, num_bytes: int) -> None:
        try_collective(self._ranks, self._device, num_bytes)

    def load(self, config: RunConfig) -> None:
        self._config = config
        self._policy = load_policy(
            config.model,
            seed=config.seed,
            device=self._device,
            max_tokens=config.max_episode_tokens,
        )

    def receive_state(self, layout: StateLayout) -> None:
        reference = layout.receive(self._policy, self._ranks)
        self.learner = Learner(
            self._policy,
            self._config.trainer,
            max_episode_tokens=self._config.max_episode_tokens,
            seed=self._config.seed,
            ranks=self._ranks,
        )
        if reference is not None:
            self._policy.keep_reference(reference)
        optimizer, device = self.learner.optimizer, self._policy.device
        layout.broadcast_optimizer(optimizer, self._ranks, device)

    def load_sharded(
        self,
        config: ModelConfig,
        seed: int,
        num_replicas: int,
        checkpoint: Path | None,
        max_tokens: int | None,
    ) -> None:
        self.policy = load_sharded_policy(
            config,
            seed=seed,
            device=self._device,
            ranks=self._ranks,
            num_replicas=num_replicas,
            checkpoint=checkpoint,
            max_tokens=max_tokens,
        )
        self.weights = ShardedPolicyWeights(self.policy, self._ranks)

    def build_learner(self, config: RunConfig) -> None:
        self.learner = ShardedLearner(self.policy, config, self._ranks)
        self.optimizer = self.learner.optimizer

    def build_warm_start(self, config: RunConfig) -> None:
        self.warm_start = ShardedWarmStart(self.policy, config, self._ranks)
        self.optimizer = self.warm_start.optimizer


def main() -> None:
    socket_path, rank, size, device, num_threads = sys.argv[1:]
    worker = Worker(int(rank), int(size), device, int(num_threads))
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(socket_path)
        connection = Connection(connected.detach())
    with connection:
        connection.send(int(rank))
        while True:
            try:
                order, arguments = connection.recv()
            except (EOFError, ConnectionError):
                break  # rank 0 has ended, so this process ends too
            worker.execute(order, arguments)
            connection.send(order)
    worker.leave()
    shutil.rmtree(Path(socket_path).parent, ignore_errors=True)  # rank 0 may have been killed


if __name__ == "__main__":
    main()
