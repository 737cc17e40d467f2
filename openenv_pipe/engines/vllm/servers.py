"""Make the vLLM servers of an engine from its configuration, without starting them.

Servers that the run starts on this machine divide it: each gets GPUs of its own, of those that the
learner does not use, or CPU cores of its own. If the learner uses all GPUs, the servers share its
first one, each with a fraction of the memory.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.installed import Installed
from openenv_pipe.engines.vllm.launch import AttachedVllmServer, VllmProcess, VllmServer
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.errors import ConfigError
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.process import usable_cores


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagedLaunch:
    """Everything that is needed to start the server processes of an engine."""

    specs: Sequence[ServerSpec]  # one for each server
    config: VllmEngineConfig
    python: Path  # the interpreter of the environment that vLLM is installed in
    logs: Path  # folder
    weights_dir: Path  # the folder that this run writes models and adapters into


MakeProcesses = Callable[[ManagedLaunch], Awaitable[list[VllmServer]]]


class MakeOnNodes(Protocol):
    """Makes the servers of `engine.launch=managed` on other machines."""

    def __call__(
        self, config: VllmEngineConfig, spec: ServerSpec, *, logs: Path, weights_dir: Path
    ) -> Sequence[VllmServer]:
        """Make `engine.num_servers` servers, without starting them; see `make_servers`."""


async def own_processes(launch: ManagedLaunch) -> list[VllmServer]:
    config = launch.config
    return [
        VllmProcess(spec, config, launch.python, log_of(spec, config, launch.logs))
        for spec in launch.specs
    ]


async def make_servers(
    config: VllmEngineConfig,
    spec: ServerSpec,
    *,
    installed: Installed | None,
    free_gpus: Sequence[str],
    logs: Path,
    weights_dir: Path,
    make_processes: MakeProcesses,
    make_on_nodes: MakeOnNodes | None,
) -> list[VllmServer]:
    """Make `engine.num_servers` servers of the kind that `engine.launch` names.

    The `build` of a launch is called for each server, with its ServerSpec, the engine's
    configuration, the path of its log, and a list of the folders that it has to read, such as the
    model's. It returns a VllmServer that has not been started.

    spec: what all of them serve.
    installed: this machine's installation of vLLM, for servers that are processes of it.
    weights_dir: the folder with published weights, which servers of this machine read.
    make_on_nodes: makes them on other machines; None: they are on this one.

    Raises ConfigError: see `placements`.
    """
    if config.launch == "attach":
        return [AttachedVllmServer(url, config) for url in config.urls]
    if make_on_nodes is not None:
        return list(make_on_nodes(config, spec, logs=logs, weights_dir=weights_dir))
    assigned = placements(
        config, on_gpu=spec.build == "cuda", free_gpus=free_gpus, cores=usable_cores()
    )
    specs = [replace(spec, number=n, placement=each) for n, each in enumerate(assigned)]
    if config.launch == "managed":
        assert installed is not None
        return await make_processes(
            ManagedLaunch(
                specs=specs,
                config=config,
                python=installed.python,
                logs=logs,
                weights_dir=weights_dir,
            )
        )
    model = Path(spec.model)
    in_weights_dir = not model.is_dir() or model.is_relative_to(weights_dir)
    folders = [weights_dir] if in_weights_dir else [weights_dir, model]
    build = load(block_types("engine.launch")[config.launch].build)
    return [build(each, config, log_of(each, config, logs), folders) for each in specs]


def log_of(spec: ServerSpec, config: VllmEngineConfig, logs: Path) -> Path:
    return logs / ("engine.log" if config.num_servers == 1 else f"engine-{spec.number}.log")


def placements(
    config: VllmEngineConfig, *, on_gpu: bool, free_gpus: Sequence[str], cores: Sequence[int]
) -> list[dict[str, str]]:
    """Return, for each server, the environment variables that assign it GPUs or CPU cores.

    Without such variables a server uses the whole machine.

    free_gpus: GPUs that the learner does not use, as CUDA_VISIBLE_DEVICES names them.
    cores: numbers of the CPU cores that this process may use.

    Raises ConfigError: there are too few GPUs, or too little memory, for `engine.num_servers`.
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
                f"engine.num_servers={count}, but the learner leaves only {len(split)} GPUs; "
                "lower engine.num_servers or trainer.devices"
            )
    else:
        if count * config.gpu_memory_share >= 1.0:
            raise ConfigError(
                f"engine.num_servers={count} servers on the learner's GPU would take all of its "
                f"memory, at engine.gpu_memory_share={config.gpu_memory_share:g} each; lower one "
                "of the two"
            )
        return [{} for _ in range(count)]
    size = len(split) // count
    return [{variable: ",".join(split[size * n : size * (n + 1)])} for n in range(count)]
