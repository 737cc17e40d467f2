"""Build what sends all weights from memory to memory, and check that it reaches the servers."""

import itertools
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.server_command import TransferBackend
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.transfers.ipc import IpcLink
from openenv_pipe.extras.transfers.link import GlooLink, Link
from openenv_pipe.extras.transfers.memory import MemoryTransfer
from openenv_pipe.extras.transfers.nccl import NcclLink
from openenv_pipe.system.http import LOOPBACK

if TYPE_CHECKING:
    from openenv_pipe.models.weights import PolicyWeights


def build_broadcast(
    weights: "PolicyWeights", root: Path, executor: Executor, backend: TransferBackend | None
) -> MemoryTransfer:
    """Send over NCCL to servers on other GPUs, and over gloo between CPUs."""
    numbers = itertools.count()

    def link(client: VllmClient) -> Link:
        return NcclLink() if backend == "nccl" else GlooLink(root / f"meeting-{next(numbers)}")

    return MemoryTransfer(weights, executor, link)


def build_ipc(
    weights: "PolicyWeights", root: Path, executor: Executor, backend: TransferBackend | None
) -> MemoryTransfer:
    """Send over CUDA IPC to a server on the learner's GPU."""
    return MemoryTransfer(weights, executor, lambda client: IpcLink())


def check_broadcast(config: VllmEngineConfig, footprint: LearnerFootprint) -> None:
    if not footprint.on_gpu:
        if footprint.servers_elsewhere:
            raise ConfigError(
                "engine.weight_transfer=broadcast from a CPU needs servers on this machine, and "
                "cluster.vllm_on_nodes=true; set engine.weight_transfer=files"
            )
        _check_near(config)
    elif config.launch == "managed" and footprint.shares_gpu:
        raise ConfigError(
            "engine.weight_transfer=broadcast: the servers share the learner's GPU, but NCCL "
            "connects only different GPUs; set engine.weight_transfer=ipc or files"
        )


def check_ipc(config: VllmEngineConfig, footprint: LearnerFootprint) -> None:
    if not footprint.on_gpu:
        raise ConfigError(
            "engine.weight_transfer=ipc needs a GPU that learner and server share, and this run "
            "learns on a CPU; set engine.weight_transfer=broadcast or files"
        )
    if config.launch == "managed" and not footprint.shares_gpu:
        raise ConfigError(
            "engine.weight_transfer=ipc: the servers run on GPUs that the learner does not use; "
            "set engine.weight_transfer=broadcast, or hide those GPUs by CUDA_VISIBLE_DEVICES"
        )


def _check_near(config: VllmEngineConfig) -> None:
    """gloo connects over the loopback interface, and finds the server by a file."""
    for url in config.urls:
        if urlsplit(url).hostname not in LOOPBACK:
            raise ConfigError(
                f"engine.weight_transfer=broadcast from a CPU needs servers on this machine, and "
                f"{url} may be on another; expected one of {', '.join(LOOPBACK)}, or "
                "engine.weight_transfer=files"
            )
