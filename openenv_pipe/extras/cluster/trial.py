"""Check a Ray cluster: what fits on its nodes and starts there, and the learner's network.

vLLM servers are not started; only room for them is taken.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.schema import RunConfig, VllmEngineConfig
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.errors import HostError
from openenv_pipe.extras.cluster.node_ranks import RayRanks
from openenv_pipe.extras.cluster.nodes import Nodes
from openenv_pipe.extras.cluster.schema import RayClusterConfig
from openenv_pipe.extras.cluster.vllm_server import remote_servers
from openenv_pipe.extras.cluster.workers import RolloutWorkers
from openenv_pipe.learner.devices import build_devices
from openenv_pipe.models.load import is_vision_model, select_device
from openenv_pipe.system.tasks import run_all

ROOM_WAIT_S = 20.0  # for the nodes of the learner, and of each vLLM server
SMALLEST_SUM, LARGE_SUM = 4, 16 * 2**20  # bytes


def try_cluster(config: RunConfig) -> Iterator[Line]:
    """Compare the workers with the nodes' cores, then start them and their servers once.

    With `cluster.vllm_on_nodes`, room for the vLLM servers is taken beside them, and vLLM is looked
    for there. With `cluster.learner_nodes` above 1, the learner's ranks are started, too, and add
    up a tensor. What needs nodes that an autoscaler would have to add is not started.

    Raises HostError and ConfigError.
    """
    settings = config.cluster
    assert isinstance(settings, RayClusterConfig)
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as folder:
        cluster = Nodes(settings.address)
        try:
            nodes = cluster.num_cores()
            num_fitting = sum(int(cores // settings.cpus_per_worker) for cores in nodes.values())
            wanted, cores = settings.rollout_workers, settings.cpus_per_worker
            sizes = ", ".join(f"{name} {number:g}" for name, number in sorted(nodes.items()))
            room = f"cores of the nodes: {sizes or 'none'}; each worker takes {cores:g}"
            if num_fitting < wanted:
                text = (
                    f"room for {num_fitting} of {wanted} rollout workers ({room}); the run waits "
                    f"cluster.start_timeout_s={settings.start_timeout_s:g} for more nodes"
                )
                yield Line("cluster", Result.WARN, text)
                return
            yield Line("cluster", Result.OK, f"room for {num_fitting} rollout workers ({room})")
            yield from asyncio.run(_try_workers(config, settings, Path(folder)))
        finally:
            cluster.close()


async def _try_workers(config: RunConfig, settings: RayClusterConfig, logs: Path) -> list[Line]:
    workers = RolloutWorkers(config, logs)
    try:
        await workers.start()
        placed = ", ".join(f"{number} on {node}" for node, number in Counter(workers.nodes).items())
        text = f"{workers.capacity} sessions opened by the rollout workers ({placed})"
        return [
            Line("workers", Result.OK, text),
            *await _try_servers(config, settings, logs),
            *await asyncio.to_thread(_try_ranks, config, settings, logs),
        ]
    finally:
        await workers.close()


async def _try_servers(config: RunConfig, settings: RayClusterConfig, logs: Path) -> list[Line]:
    """Find nodes with room and vLLM for all servers at once, without starting them."""
    engine = config.engine
    if not settings.vllm_on_nodes:
        return []
    assert isinstance(engine, VllmEngineConfig)
    spec = ServerSpec(
        model="",
        revision=None,
        build="cuda" if select_device(config.device).type == "cuda" else "cpu",
        dtype=engine.dtype,
        lora_rank=0,
        sees_images=is_vision_model(config.model),
    )
    servers = remote_servers(_soon(settings), engine, spec, logs=logs, weights_dir=logs)
    try:
        await run_all(server.place() for server in servers)
        found = Counter(f"{server.node} with vLLM {server.about['vllm']}" for server in servers)
        placed = ", ".join(f"{number} on {node}" for node, number in found.items())
        return [Line("engine", Result.OK, f"room for {len(servers)} vLLM servers ({placed})")]
    except HostError as error:
        return [Line("engine", Result.WARN, str(error))]
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


def _try_ranks(config: RunConfig, settings: RayClusterConfig, logs: Path) -> Iterator[Line]:
    """Start the learner's ranks on all their nodes, and measure a sum over them."""
    if settings.learner_nodes == 1:
        return
    device, num_devices = select_device(config.device), config.trainer.devices
    nodes = RayRanks(_soon(settings), device)
    devices = build_devices(config, device, logs, num_threads=1, nodes=nodes)
    try:
        devices.time_sum(SMALLEST_SUM)  # starts them
        duration_s = devices.time_sum(LARGE_SUM)
        text = (
            f"{num_devices} ranks of the learner, {nodes.summary()} and the rest "
            f"on this machine, add up {LARGE_SUM >> 20} MiB in {duration_s:.2g} s"
        )
        yield Line("learner", Result.OK, text)
    except HostError as error:
        yield Line("learner", Result.WARN, str(error))
    finally:
        devices.close()


def _soon(settings: RayClusterConfig) -> RayClusterConfig:
    """Return the settings with a shorter wait for nodes."""
    return settings.model_copy(
        update={"start_timeout_s": min(ROOM_WAIT_S, settings.start_timeout_s)}
    )
