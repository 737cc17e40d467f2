"""vLLM servers on the nodes of a simulated cluster: the run trains, and outlives a lost node."""

from contextlib import suppress

import psutil
import pytest

from openenv_pipe.commands.findings import Result
from openenv_pipe.commands.preflight.cluster import check_cluster
from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm.placed_server import PlacedVllmServer
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.errors import HostError
from tests.commands import Command, servers_of, wait_until
from tests.ray_cluster import ray_cluster
from tests.vllm_runs import LIMIT_S, assert_trained_and_agreed, steps_of
from tests.vllm_server import SMALL, installed_vllm

TRAIN = ("train", *SMALL, "eval.num_tasks=2", "trainer.optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def cluster():
    """Three nodes with one core each: for a worker, for a server, and for what replaces one."""
    if isinstance(reason := installed_vllm(), str):
        pytest.skip(reason)
    with ray_cluster(1, 1, 1) as cluster:
        yield cluster


def on_nodes(cluster, *more):
    """Return the overrides of one worker and one vLLM server, each on a node of its own."""
    return (
        "cluster=ray",
        f"cluster.address={cluster.address}",
        "cluster.rollout_workers=1",
        "cluster.vllm_on_nodes=true",
        *more,
    )


def processes_of(folder, word):
    """Return the processes whose command line has a word and that work in the run's folder."""
    found = []
    for process in servers_of(folder):
        with suppress(psutil.Error):  # it has just ended
            if any(word in part for part in process.cmdline()):
                found.append(process)
    return found


def node_of(cluster, process):
    """Return the node of the cluster that runs a process of Ray's."""
    return next(
        node
        for node in cluster.worker_nodes
        if node.all_processes["raylet"][0].process.pid == process.ppid()
    )


def test_a_run_with_a_server_on_a_node_outlives_that_node(cluster, tmp_path):
    """Worker, server and learner are on three nodes; the server's is killed after a step."""
    command = Command(tmp_path, *TRAIN, *on_nodes(cluster))
    try:
        wait_until(lambda: steps_of(tmp_path), "a step", command, limit_s=LIMIT_S)
        (server,) = processes_of(tmp_path, "ray::NodeServer")
        (worker,) = processes_of(tmp_path, "ray::RolloutWorker")
        node = node_of(cluster, server)
        assert node is not node_of(cluster, worker)
        cluster.remove_node(node, allow_graceful=False)
        assert command.wait(timeout=LIMIT_S) == 0, command.err
    finally:
        command.kill()
    assert "restart 1 of" in command.err
    assert_trained_and_agreed(tmp_path)
    wait_until(lambda: not servers_of(tmp_path), "the end of all processes of the run")
    log = next((tmp_path / "runs" / "smoke" / "0001" / "logs").rglob("engine.log"))
    assert log.read_text().count("Application startup complete") == 2


def test_a_killed_driver_leaves_no_server_on_any_node(cluster, tmp_path):
    command = Command(tmp_path, *TRAIN, *on_nodes(cluster))
    try:
        wait_until(
            lambda: processes_of(tmp_path, "vllm.entrypoints"), "a server", command, limit_s=LIMIT_S
        )
    finally:
        command.kill()
    wait_until(lambda: not servers_of(tmp_path), "the end of all processes of the run")


def test_check_finds_room_and_vllm(cluster):
    config = compose(["conf=smoke", *SMALL, *on_nodes(cluster)]).config
    room, workers, engine = check_cluster(config)
    assert [line.result for line in (room, workers, engine)] == [Result.OK] * 3
    assert engine.text.startswith("room for 1 vLLM servers (1 on ")


async def test_a_cluster_without_room_says_what_is_missing(cluster, tmp_path):
    more = ("cluster.cpus_per_vllm_server=64", "cluster.start_timeout_s=2")
    config = compose(["conf=smoke", *SMALL, *on_nodes(cluster, *more)]).config
    spec = ServerSpec(model="", revision=None, build="cpu", dtype="float32", lora_rank=0)
    server = PlacedVllmServer(
        spec, config.engine, config.cluster, is_written=False, log=tmp_path / "engine.log"
    )
    with pytest.raises(HostError, match=r"found no node within .*cpus_per_vllm_server=64.*free"):
        await server.start()
