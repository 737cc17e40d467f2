"""A simulated Ray cluster on this machine: each node is a raylet of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
NUM_STARTS = 5  # at most
STORE_BYTES = 80 * 2**20  # of each node's object store, the smallest that Ray allows


@contextmanager
def ray_cluster(*num_cpus: float) -> Iterator[Any]:
    """Start a head without cores, and a node with each of these numbers of cores."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # it would report to Ray's makers
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: too nice on a busy machine
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns about its default
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = started(
            lambda: Cluster(initialize_head=True, head_node_args=node_options(0)), "the head"
        )
        try:
            for number in num_cpus:
                add_node(cluster, number)
            yield cluster
        finally:
            cluster.shutdown()


def add_node(cluster: Any, num_cpus: float) -> Any:
    return started(lambda: cluster.add_node(**node_options(num_cpus)), "a node")


def started(start: Callable[[], Any], what: str) -> Any:
    """Start a part of the cluster. Ray gives each 30 seconds, which a busy machine may need."""
    for _ in range(NUM_STARTS - 1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            print(f"{what} is started again: {error}")
    return start()


def node_options(num_cpus: float) -> dict[str, object]:
    return {
        "num_cpus": num_cpus,
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
    }
