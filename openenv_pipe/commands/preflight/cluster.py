"""Check a Ray cluster: what fits on its nodes, whether it starts there, and the network between the
learner's ranks."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.schema import RayClusterConfig, RunConfig
from openenv_pipe.errors import HostError
from openenv_pipe.learner.distributed.build import build_workers
from openenv_pipe.models.load import select_device
from openenv_pipe.rollout.cluster.workers import RolloutWorkers
from openenv_pipe.system.ray_cluster import RayCluster

ROOM_WAIT_S = 20.0  # for the learner's nodes
SMALLEST_SUM, LARGE_SUM = 4, 16 * 2**20  # bytes


def check_cluster(config: RunConfig) -> Iterator[Line]:
    """Compare the workers with the nodes' cores, then start them and their servers once.

    With `cluster.learner_nodes` above 1, the learner's ranks are started beside them, and add up a
    tensor. What needs nodes that an autoscaler would have to add is not started.

    Raises:
        HostError: the cluster cannot be joined, or a worker does not start.
        ConfigError: the environment cannot be run on a node.
    """
    settings = config.cluster
    if not isinstance(settings, RayClusterConfig):
        return
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as folder:
        cluster = RayCluster(settings.address)
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
            yield from asyncio.run(_try_workers(config, Path(folder)))
        finally:
            cluster.close()


async def _try_workers(config: RunConfig, logs: Path) -> list[Line]:
    workers = RolloutWorkers(config, logs)
    try:
        await workers.start()
        placed = ", ".join(f"{number} on {node}" for node, number in Counter(workers.nodes).items())
        text = f"{workers.capacity} sessions opened by the rollout workers ({placed})"
        return [
            Line("workers", Result.OK, text),
            *await asyncio.to_thread(_try_ranks, config, logs),
        ]
    finally:
        await workers.close()


def _try_ranks(config: RunConfig, logs: Path) -> Iterator[Line]:
    """Start the learner's ranks on all their nodes, and measure a sum over them."""
    settings = config.cluster
    assert isinstance(settings, RayClusterConfig)
    if settings.learner_nodes == 1:
        return
    soon = {"start_timeout_s": min(ROOM_WAIT_S, settings.start_timeout_s)}
    config = config.model_copy(
        update={
            "cluster": settings.model_copy(update=soon),
            "trainer": config.trainer.model_copy(update={"parallel": "data"}),  # loads no model
        }
    )
    ranks = build_workers(config, select_device(config.device), logs, num_threads=1)
    assert ranks is not None and ranks.nodes is not None
    try:
        ranks.try_collective(SMALLEST_SUM)  # starts them
        duration_s = ranks.try_collective(LARGE_SUM)
        text = (
            f"{config.trainer.devices} ranks of the learner, {ranks.nodes.summary()} and the rest "
            f"on this machine, add up {LARGE_SUM >> 20} MiB in {duration_s:.2g} s"
        )
        yield Line("learner", Result.OK, text)
    except HostError as error:
        yield Line("learner", Result.WARN, str(error))
    finally:
        ranks.close()
