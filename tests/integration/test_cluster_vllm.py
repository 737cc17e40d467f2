"""vLLM servers on nodes of a simulated cluster, workers and ranks of the learner on others: the run
trains, and outlives lost nodes; every way of publishing reaches a server on a node."""

from contextlib import suppress

import psutil
import pytest
from fakes import LOSS_BOUND

from openenv_pipe.commands.findings import Result
from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.launch import AttachedVllmServer
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.errors import HostError
from openenv_pipe.extras.cluster.trial import try_cluster
from openenv_pipe.extras.cluster.vllm_server import RemoteVllmServer, remote_servers
from openenv_pipe.extras.reproduce.replaying import replay
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.pipeline.run import Attempt, RunControl
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.readiness import wait_until_healthy
from tests.commands import Command, servers_of, wait_until
from tests.fakes import all_episodes, collect
from tests.integration.test_vllm_engine import change, largest_difference
from tests.ray_cluster import ray_cluster
from tests.vllm_runs import BOUND, LIMIT_S, assert_trained_and_agreed, steps_of
from tests.vllm_server import (
    LORA_RANK,
    SMALL,
    START_LIMIT_S,
    Served,
    installed_vllm,
    opened,
    small_policy,
)

# Not compiled, which takes half of the time of a server's start.
EAGER = 'engine.arguments=["--enforce-eager"]'
SETTINGS = (*SMALL, EAGER, "eval.num_tasks=2", "trainer.optimizer.lr=1e-2")
ON_TWO_NODES = ("trainer.devices=2", "cluster.learner_nodes=2", "trainer.parallel=fsdp")
MERGED = (f"model.lora.rank={LORA_RANK}", "engine.publish=merged")
END_LIMIT_S = 10.0  # after the driver's death


@pytest.fixture(scope="module")
def cluster():
    """Five nodes with one core each: for a worker, a server, a rank, and what replaces two."""
    if isinstance(reason := installed_vllm(), str):
        pytest.skip(reason)
    with ray_cluster(1, 1, 1, 1, 1) as cluster:
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


def placed_of(folder):
    """Return Ray's processes of the vLLM server, the rollout worker and the second rank."""
    names = ("ray::NodeProcess", "ray::RolloutWorker", "ray::Worker")
    return [process for name in names for process in processes_of(folder, name)]


def losses_of(folder):
    """Return the learner's metrics of each step."""
    return [
        {key: value for key, value in line.items() if key.startswith(("loss/", "grad"))}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def test_a_run_on_four_nodes_outlives_two_and_has_the_losses_of_one_process(cluster, tmp_path):
    """Worker, server and the learner's two ranks, which have a shard each, are on four nodes. Those
    of worker and server are killed in a step. One process then learns from the same episodes."""
    given = (*ON_TWO_NODES, *MERGED)
    command = Command(tmp_path, "train", *SETTINGS, *on_nodes(cluster, *given))
    try:
        wait_until(lambda: steps_of(tmp_path), "a step", command, limit_s=LIMIT_S)
        *lost, rank = placed_of(tmp_path)
        nodes = [node_of(cluster, process) for process in (*lost, rank)]
        assert len({*nodes, cluster.head_node}) == 4
        with command.paused():
            for node in nodes[:2]:
                cluster.remove_node(node, allow_graceful=False)
            wait_until(lambda: not any(process.is_running() for process in lost), "the nodes' end")
        assert command.wait(timeout=LIMIT_S) == 0, command.err
    finally:
        command.kill()
    assert "restart 1 of" in command.err
    assert_trained_and_agreed(tmp_path)
    wait_until(lambda: not servers_of(tmp_path), "the end of all processes of the run")
    run_folder = tmp_path / "runs" / "smoke" / "0001"
    log = next((run_folder / "logs").rglob("engine.log"))
    assert log.read_text().count("Application startup complete") == 2
    composed = compose([*SETTINGS, *MERGED, f"runs_dir={tmp_path / 'alone'}"])
    alone = RunFolder.create(composed.config, overrides=composed.overrides, command=["test"])
    replay(Attempt(folder=alone, config=composed.config), RunControl(), run_folder)
    for ours, theirs in zip(losses_of(run_folder), losses_of(alone.path), strict=True):
        assert ours and ours == pytest.approx(theirs, rel=LOSS_BOUND, abs=LOSS_BOUND)


def test_a_killed_driver_leaves_nothing_on_any_node(cluster, tmp_path):
    command = Command(tmp_path, "train", *SETTINGS, *on_nodes(cluster, *ON_TWO_NODES))
    try:
        wait_until(
            lambda: processes_of(tmp_path, "VLLM::Worker"), "a server", command, limit_s=LIMIT_S
        )
        assert len({node_of(cluster, process) for process in placed_of(tmp_path)}) == 3
        assert processes_of(tmp_path, "VLLM::EngineCore")
    finally:
        command.kill()
    wait_until(lambda: not servers_of(tmp_path), "the end of all processes", limit_s=END_LIMIT_S)


async def test_every_way_of_publishing_reaches_a_divided_server_on_a_node(
    cluster, tmp_path, monkeypatch
):
    """Its two processes (tensor parallelism) get copies of all files, on their node."""
    given = ('engine.arguments=["--tensor-parallel-size=2"]',)
    config = compose([*SMALL, *on_nodes(cluster, *given)]).config
    root, log = tmp_path / "run", tmp_path / "engine.log"
    PolicyWeights(small_policy(config)).write_base(root / "base")
    spec = ServerSpec(
        model=str(root / "base"), revision=None, build="cpu", dtype="float32", lora_rank=LORA_RANK
    )
    (server,) = remote_servers(config.cluster, config.engine, spec, logs=tmp_path, weights_dir=root)
    try:
        await server.start()
        async with VllmClient(server.url, api_key=server.key, request_timeout_s=60) as client:
            await wait_until_healthy(server.url, timeout_s=START_LIMIT_S, check=client.check_health)
        monkeypatch.setattr(AttachedVllmServer, "files", server.files)
        served = Served(url=server.url, key=server.key, base=root / "base", log=log)
        for way in (MERGED[:1], MERGED, ()):  # the adapter, merged and full weights
            async with opened(served, tmp_path, *way) as (engine, policy):
                for version in (1, 2):
                    change(policy)
                    await engine.publish(version)
                episodes = all_episodes(await collect(policy, engine=engine))
                assert largest_difference(policy, episodes, 1.0) < BOUND
                measured = await engine.metrics()
                assert (
                    measured["logprob_check/difference"] < BOUND < measured["logprob_check/moved"]
                )
    finally:
        await server.stop()
    assert "tensor_parallel_size=2" in log.read_text()


def test_check_finds_room_and_vllm(cluster):
    config = compose(["conf=smoke", *SMALL, *on_nodes(cluster)]).config
    room, workers, engine = try_cluster(config)
    assert [line.result for line in (room, workers, engine)] == [Result.OK] * 3
    assert engine.text.startswith("room for 1 vLLM servers (1 on ")


async def test_a_cluster_without_room_says_what_is_missing(cluster, tmp_path):
    more = ("cluster.cpus_per_vllm_server=64", "cluster.start_timeout_s=2")
    config = compose(["conf=smoke", *SMALL, *on_nodes(cluster, *more)]).config
    spec = ServerSpec(model="", revision=None, build="cpu", dtype="float32", lora_rank=0)
    server = RemoteVllmServer(
        spec, config.engine, config.cluster, is_written=False, log=tmp_path / "engine.log"
    )
    with pytest.raises(HostError, match=r"found no node within .*cpus_per_vllm_server=64.*free"):
        await server.start()
