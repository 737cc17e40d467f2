"""The devices that a run learns on: one alone, or several if an extra brings them."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.teacher import give_teachers
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.registry import extras, load

LONGEST_WAIT = timedelta(minutes=10)  # of a collective, for the slowest rank
MAX_RANKS_PER_CORE = 4  # each needs a core to be of use, and the memory of a process


class Devices:
    """One device, that of this process. A subclass is for trainer.devices above 1."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._config = config
        self._device = device

    def load_policy(self, checkpoint: Path | None) -> tuple[Policy, str | None]:
        """Load the policy and check its forward pass.

        Returns the policy and why its samples are padded instead of packed; None if they are
        packed.

        Raises ConfigError: the model cannot be read, trained or sharded.
        """
        max_tokens = self._config.max_episode_tokens
        policy = load_policy(
            self._config.model,
            seed=self._config.seed,
            device=self._device,
            checkpoint=checkpoint,
            max_tokens=max_tokens,
        )
        return policy, check_forward(policy, max_tokens)

    def learner(self, policy: Policy) -> Learner:
        """Build the learner of a run.

        Raises ConfigError: a teacher cannot be read, or none of its forward passes is right.
        """
        give_teachers(policy, self._config)
        return Learner(
            policy,
            self._config.trainer,
            max_episode_tokens=self._config.max_episode_tokens,
            seed=self._config.seed,
        )

    def warm_start(self, policy: Policy) -> WarmStart:
        """Build what trains the policy on given replies."""
        trainer = self._config.trainer
        return WarmStart(
            policy,
            trainer.warm_start,
            tokens_per_batch=trainer.tokens_per_batch,
            seed=self._config.seed,
        )

    def weights(self, policy: Policy) -> PolicyWeights:
        """Build what gives the policy to vLLM servers."""
        return PolicyWeights(policy)

    def time_sum(self, num_bytes: int) -> float:
        """Add up a tensor over all devices; return the seconds that it takes, 0 for one device.

        Raises:
            TrainingError: a device is lost, or has a wrong sum.
            ConfigError, HostError: there are fewer devices.
        """
        return 0.0

    def close(self) -> None:
        """End all other processes, whatever they are doing; another thread may be starting them."""


class NodeRanks(Protocol):
    """The ranks on other machines, as seen from rank 0. All methods block."""

    @property
    def num_nodes(self) -> int:
        """The number of machines, this one included, that the ranks are divided over equally."""

    def start(self, worker: str, size: int, num_threads: int) -> None:
        """Start the ranks, and wait until they can take orders.

        worker: "module:name" of the class that executes each rank's orders.
        size: the number of all ranks. num_threads: of each rank on a CPU.

        Raises:
            HostError: there is no room for them.
            RankLostError: a rank ended while it started.
            ConfigError: a machine does not have the run's folder, which sharded ranks need.
        """

    def listen(self) -> socket.socket:
        """Listen on an address of this machine that the other ones reach, at any free port."""

    def send(self, order: str, arguments: Sequence[Any]) -> None:
        """Let all ranks execute an order, after those before it."""

    def wait_until_done(self, order: str) -> None:
        """Wait for the end of the last order. Raises RankLostError and the errors of the ranks."""

    def failure(self) -> PipeError | None:
        """Return why a rank has ended, if one has."""

    def close(self) -> None:
        """End all ranks for good, whatever they are doing. A second call does nothing."""


def build_devices(
    config: RunConfig,
    device: torch.device,
    logs: Path,
    num_threads: int,
    nodes: NodeRanks | None = None,
) -> Devices:
    """Build the devices of a run. Nothing is started.

    device: of this process. logs, num_threads: of all ranks on this machine. nodes: starts those
    on other machines.

    Raises ConfigError: there are several, and no extra brings them.
    """
    if config.trainer.devices == 1:
        return Devices(config, device)
    return several_devices(config).build(config, device, logs, num_threads, nodes)


def several_devices(config: RunConfig) -> Any:
    """Return the subclass of `Devices` for several; it has `build` and `check`.

    Raises ConfigError: no extra brings it.
    """
    for extra in extras():
        if extra.devices:
            return load(extra.devices)
    raise ConfigError(
        f"trainer.devices={config.trainer.devices} is not supported: no folder of "
        "openenv_pipe/extras/ trains on several devices; set trainer.devices=1"
    )


def reject_missing_devices(num_devices: int, device: torch.device) -> None:
    """Raise ConfigError if there are fewer GPUs than ranks, or far fewer cores of a CPU."""
    num_cores = os.cpu_count() or 1
    if device.type == "cpu" and num_devices > MAX_RANKS_PER_CORE * num_cores:
        raise ConfigError(
            f"trainer.devices={num_devices}, but this machine has only {num_cores} cores; "
            f"set trainer.devices to at most {MAX_RANKS_PER_CORE * num_cores}"
        )
    if device.type == "cuda" and num_devices > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.devices={num_devices}, but torch sees {torch.cuda.device_count()} CUDA "
            "devices; set trainer.devices to at most that number, or device=cpu"
        )
