"""From a configuration to its servers, one or several, none of which has started.

Several that we start get their own share of this machine: GPUs that the learner leaves alone, or
stretches of the cores. Where there is one GPU all are on it, by fractions of its memory.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.install import Installed
from openenv_pipe.engines.vllm.launch import AttachedServer, ManagedServer, Server
from openenv_pipe.engines.vllm.launch_docker import DockerServer
from openenv_pipe.engines.vllm.server_command import Plan
from openenv_pipe.engines.vllm.shared_server import BorrowedServer, model_digest
from openenv_pipe.errors import ConfigError


def build_servers(
    config: VllmEngineConfig,
    plan: Plan,
    *,
    installed: Installed | None,
    free_gpus: Sequence[str],
    logs: Path,
    root: Path,
    keeper: Path | None,
) -> list[Server]:
    """root: the folder of weights, which all of them read. See `opening.open_engine`."""
    if config.launch == "attach":
        return [AttachedServer(url, config) for url in config.urls]
    placements = place(config, on_gpu=plan.build == "cuda", free_gpus=free_gpus, cores=_cores())
    plans = [
        replace(plan, number=number, placement=placement)
        for number, placement in enumerate(placements)
    ]
    if config.launch == "docker":
        model = Path(plan.model)
        folders = [root] if not model.is_dir() or model.is_relative_to(root) else [root, model]
        return [DockerServer(each, config, log_of(each, config, logs), folders) for each in plans]
    if keeper is not None:
        is_written = Path(plan.model).is_relative_to(root)
        digest = model_digest(plan, written=is_written, weights_matter=bool(plan.lora_rank))
        return [BorrowedServer(each, config, digest, keeper) for each in plans]
    assert installed is not None
    python = installed.python
    return [ManagedServer(each, config, python, log_of(each, config, logs)) for each in plans]


def log_of(plan: Plan, config: VllmEngineConfig, logs: Path) -> Path:
    return logs / ("engine.log" if config.num_servers == 1 else f"engine-{plan.number}.log")


def place(
    config: VllmEngineConfig, *, on_gpu: bool, free_gpus: Sequence[str], cores: Sequence[int]
) -> list[dict[str, str]]:
    """Variables for each server that say what of the machine is its own; none: all of it.

    free_gpus: those that the learner leaves alone, as CUDA_VISIBLE_DEVICES names them.
    Raises ConfigError where they do not suffice.
    """
    count = config.num_servers
    if not on_gpu:
        # vLLM binds its threads to cores, and each server would take the same ones.
        variable, split = "VLLM_CPU_OMP_THREADS_BIND", [str(core) for core in cores]
        if count == 1:
            return [{}]
        while len(split) < count:
            split += split
    elif free_gpus:
        variable, split = "CUDA_VISIBLE_DEVICES", list(free_gpus)
        if len(split) < count:
            raise ConfigError(
                f"engine.num_servers={count}, and the learner leaves {len(split)} GPUs; "
                "lower it, or trainer.devices"
            )
    else:
        if count * config.gpu_memory_share >= 1.0:
            raise ConfigError(
                f"engine.num_servers={count} on the learner's GPU, with engine.gpu_memory_share="
                f"{config.gpu_memory_share:g} each, is all its memory; lower one of them"
            )
        return [{} for _ in range(count)]
    size = len(split) // count
    return [{variable: ",".join(split[size * n : size * (n + 1)])} for n in range(count)]


def _cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
