"""Start a vLLM engine with its servers as its configuration says, and stop it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.config.schema.engine_base import PublishMode
from openenv_pipe.config.schema.model import ModelSource
from openenv_pipe.engines.vllm.engine import VllmEngine
from openenv_pipe.engines.vllm.installed import Build, Installed, require_installed
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.logprob_check import LogprobCheck
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.publish_mode import check_transfer, transfer_backend
from openenv_pipe.engines.vllm.replica import Replica
from openenv_pipe.engines.vllm.server_command import ServerSpec, TransferBackend
from openenv_pipe.engines.vllm.servers import (
    MakeOnNodes,
    MakeProcesses,
    make_servers,
    own_processes,
)
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint, sleep_level
from openenv_pipe.engines.vllm.transfer import AdapterFiles, Transfer
from openenv_pipe.engines.vllm.versions import Versions
from openenv_pipe.engines.vllm.weights_folder import full_as_config_error, weights_folder
from openenv_pipe.errors import ConfigError
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.tasks import in_thread, run_all

if TYPE_CHECKING:
    from openenv_pipe.models.weights import PolicyWeights

Notify = Callable[[str], None]


@asynccontextmanager
async def open_engine(
    config: VllmEngineConfig,
    weights: "PolicyWeights",
    *,
    source: ModelSource | None,
    footprint: LearnerFootprint,
    logs: Path,
    executor: Executor,
    notify: Notify,
    make_processes: MakeProcesses = own_processes,
    make_on_nodes: MakeOnNodes | None = None,
) -> AsyncIterator[VllmEngine]:
    """Start the servers, publish the current policy to them and check it. Stop them at the end.

    source: the base model; None: the engine writes it into a folder for the servers.
    footprint: the learner's use of this machine's GPUs.
    executor: torch's thread.
    make_processes: makes the servers of `engine.launch=managed` on this machine.
    make_on_nodes: makes them on other machines instead.

    Raises:
        ConfigError: something does not fit: the configuration, or weights into their folder.
        EngineError: a server does not start, or rejects the policy.
        TrainingError: a server computes other logprobs than the trainer.
    """
    mode = _publish_mode(config, weights, on_gpu=footprint.on_gpu)
    check_transfer(config, footprint)
    level = sleep_level(config, footprint, mode=mode)
    spec = _server_spec(config, weights, source, footprint, mode=mode, sleeps=level > 0)
    installed = None if make_on_nodes else _required_installation(config, spec)
    with full_as_config_error(config.weights_dir), weights_folder(config.weights_dir) as root:
        if source is None and config.starts_servers:
            spec = replace(spec, model=str(root / "base"))
            await in_thread(executor, weights.write_base, root / "base")
        servers = await make_servers(
            config,
            spec,
            installed=installed,
            free_gpus=footprint.free_gpus,
            logs=logs,
            weights_dir=root,
            make_processes=make_processes,
            make_on_nodes=make_on_nodes,
        )
        facts = _own_facts(config, mode, level, installed)
        transfer = build_transfer(config, mode, weights, root, executor, spec.transfer_backend)
        async with running(
            config,
            weights,
            Versions(transfer, Owner.new(logs), root.name),
            servers,
            root=root,
            executor=executor,
            sleep_level=level,
            facts={"engine": facts},
            notify=notify,
        ) as engine:
            facts |= _server_facts(servers, are_on_nodes=make_on_nodes is not None)
            yield engine


def _publish_mode(
    config: VllmEngineConfig, weights: "PolicyWeights", *, on_gpu: bool
) -> PublishMode:
    return config.publish_mode(
        weights.lora_rank, dtype=weights.dtype, precision=weights.precision, on_gpu=on_gpu
    )


def _server_spec(
    config: VllmEngineConfig,
    weights: "PolicyWeights",
    source: ModelSource | None,
    footprint: LearnerFootprint,
    *,
    mode: PublishMode,
    sleeps: bool,
) -> ServerSpec:
    """Return what the servers serve; without a source, the model is not yet known."""
    build: Build = "cuda" if footprint.on_gpu else "cpu"
    return ServerSpec(
        model=source.path if source else "",
        revision=source.revision if source else None,
        build=build,
        dtype=config.served_precision(weights.precision),
        lora_rank=weights.lora_rank if mode == "adapter" else 0,
        sees_images=weights.placeholder_id is not None,
        sleeps=sleeps,
        transfer_backend=transfer_backend(config, mode, build),
    )


def _required_installation(config: VllmEngineConfig, spec: ServerSpec) -> Installed | None:
    """Return the vLLM that the servers run with; None: they are not processes of this machine."""
    if config.launch != "managed":
        return None
    return require_installed(spec.build, sees_images=spec.sees_images)


def _own_facts(
    config: VllmEngineConfig, mode: PublishMode, level: int, installed: Installed | None
) -> dict[str, Any]:
    return {
        "launch": config.launch,
        "publish": mode,
        "weight_transfer": config.weight_transfer,
        "sleep_level": level,
        "vllm": installed.version if installed else None,
        "packages": installed.packages if installed else None,
    }


def _server_facts(servers: Sequence[VllmServer], *, are_on_nodes: bool) -> dict[str, Any]:
    """Return what servers that others started or keep have reported about themselves."""
    about = [server.about for server in servers if server.about]
    if not about:
        return {}
    if are_on_nodes:
        return {"on_nodes": about[0]}  # all nodes have the same version
    return {"shared_servers": about[0] if len(about) == 1 else about}


@asynccontextmanager
async def running(
    config: VllmEngineConfig,
    weights: "PolicyWeights",
    versions: Versions,
    servers: Sequence[VllmServer],
    *,
    root: Path,
    executor: Executor,
    sleep_level: int,
    facts: Mapping[str, Any],
    notify: Notify,
) -> AsyncIterator[VllmEngine]:
    """Start the servers and give them the current policy; see `open_engine`.

    root: the folder that the probe is written into.
    sleep_level: vLLM's level of sleep during updates; 0: the servers stay awake.
    """
    dtype = config.served_precision(weights.precision)
    exact = "float32" if dtype == weights.precision == "float32" else "bfloat16"
    logprob_check = LogprobCheck(weights, dtype=exact, max_model_len=config.max_model_len)
    sends_adapters = versions.transfer.sends_adapters
    probe = await in_thread(executor, partial(logprob_check.begin, root, with_probe=sends_adapters))
    replicas = [
        Replica(
            number,
            server,
            config,
            versions=versions,
            logprob_check=logprob_check,
            probe=probe,
            exclusive=sleep_level > 0 or not sends_adapters,
            vocabulary_size=weights.vocabulary_size,
            notify=_notifier(notify, number if len(servers) > 1 else None),
        )
        for number, server in enumerate(servers)
    ]
    engine = VllmEngine(
        config,
        weights=weights,
        replicas=replicas,
        versions=versions,
        logprob_check=logprob_check,
        executor=executor,
        sleep_level=sleep_level,
        facts=facts,
    )
    try:
        await run_all(replica.open() for replica in replicas)
        if sleep_level and not config.starts_servers:
            await run_all(_reject_sleepless(replica, config.sleep) for replica in replicas)
        await engine.publish(0)
        yield engine
    finally:
        await asyncio.shield(_close(replicas, versions, withdraw=not config.starts_servers))


async def _close(replicas: Sequence[Replica], versions: Versions, *, withdraw: bool) -> None:
    closing = (replica.close(withdraw=withdraw) for replica in replicas)
    results = await asyncio.gather(*closing, return_exceptions=True)
    await asyncio.to_thread(versions.transfer.close)
    for error in results:
        if error is not None:
            raise error


async def _reject_sleepless(replica: Replica, sleep: str) -> None:
    client = await replica.serving()
    if not await client.can_sleep():
        raise ConfigError(
            f"engine.sleep={sleep}: the server at {client.url} cannot be put to sleep; start it "
            "with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode, or set engine.sleep=never"
        )


def _notifier(notify: Notify, number: int | None) -> Notify:
    """Return `notify` with the server's number before each message; None: it is the only server."""
    name = "engine" if number is None else f"engine {number}"
    return lambda text: notify(f"{name}: {text}")


def build_transfer(
    config: VllmEngineConfig,
    mode: PublishMode,
    weights: "PolicyWeights",
    root: Path,
    executor: Executor,
    backend: TransferBackend | None = None,
) -> Transfer:
    """Return the transfer that brings weights to the servers.

    The `build` of a type of `engine.weight_transfer` is called with all but the first two, and its
    `check` with the engine's configuration and the learner's footprint.

    root: a folder in which the servers of this machine can write.
    """
    if mode == "adapter":
        return AdapterFiles(weights.write_adapter, root, executor)
    build = load(block_types("engine.weight_transfer")[config.weight_transfer].build)
    return build(weights, root, executor, backend)
