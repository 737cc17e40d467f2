"""Check a Ray cluster: how many rollout workers fit, and whether they start on its nodes."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.schema import RayClusterConfig, RunConfig
from openenv_pipe.rollout.cluster.workers import RolloutWorkers
from openenv_pipe.system.ray_cluster import RayCluster


def check_cluster(config: RunConfig) -> Iterator[Line]:
    """Compare the workers with the nodes' cores, then start them and their servers once.

    Workers for which an autoscaler would have to add nodes are not started.

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
            yield asyncio.run(_try_workers(config, Path(folder)))
        finally:
            cluster.close()


async def _try_workers(config: RunConfig, logs: Path) -> Line:
    workers = RolloutWorkers(config, logs)
    try:
        await workers.start()
        placed = ", ".join(f"{number} on {node}" for node, number in Counter(workers.nodes).items())
        text = f"{workers.capacity} sessions opened by the rollout workers ({placed})"
    finally:
        await workers.close()
    return Line("workers", Result.OK, text)
