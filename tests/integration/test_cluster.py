"""`cluster=ray` on a simulated cluster: the same run as on one machine, and what happens to it
when workers, nodes, the driver or the cluster's head are lost."""

import asyncio
import gzip
import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from fakes import CPU, LOSS_BOUND, random_samples
from safetensors.torch import load_file

from openenv_pipe.commands.findings import Result
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.extras.cluster.node_ranks import RayRanks
from openenv_pipe.extras.cluster.nodes import Nodes
from openenv_pipe.extras.cluster.trial import try_cluster
from openenv_pipe.extras.cluster.workers import RolloutWorkers
from openenv_pipe.extras.devices.workers import WORKER
from openenv_pipe.learner.devices import build_devices
from openenv_pipe.pipeline.cluster import build_cluster
from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import LIMIT_S, SMALL, Command, ended_by, run, servers_of, wait_until
from tests.integration.test_sweep import TINY, runs_of, sweep_of
from tests.ray_cluster import add_node, ray_cluster

EVAL = ("eval.baselines=false", "eval.greedy=false", "eval.num_tasks=2")
ON_TWO_NODES = ("trainer.devices=2", "cluster.learner_nodes=2", "cluster.rollout_workers=1")
WHOLE_NODE = "cluster.cpus_per_rank=2"  # so that the worker is on another node than the rank
TRAIN = ("train", "conf=smoke", *SMALL, "trainer.steps=4", *EVAL)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(2, 2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run folder of one machine alone."""
    folder = tmp_path_factory.mktemp("alone")
    code, _, err = run(folder, *TRAIN)
    assert code == 0, err
    return folder / "runs" / "smoke" / "0001"


def by_ray(cluster, *more):
    """Return the overrides of two workers, of which a node has room for both."""
    given = (f"cluster.address={cluster.address}", "cluster.cpus_per_worker=1", *more)
    return ("cluster=ray", *given)


def numbers(folder):
    """Return the metrics, without durations."""
    return [
        {key: value for key, value in line.items() if not key.startswith("time/")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def episodes(folder):
    """Return what was played, without durations."""
    found = {}
    for path in sorted((folder / "episodes").glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line in file]
        found[path.name] = [{k: v for k, v in row.items() if k != "duration_s"} for row in rows]
    assert found
    return found


def without_logprobs(folder):
    """Return what was played, and the logprobs beside it."""
    found = {name: rows for name, rows in episodes(folder).items() if name.startswith("step_")}
    for turn in (turn for rows in found.values() for row in rows for turn in row["turns"]):
        del turn["logprobs"]
    groups = [group for name in found for group in read_episodes(folder / "episodes" / name)]
    played = [turn for group in groups for each in group.episodes for turn in each.turns]
    return found, [value for turn in played for value in turn.logprobs]


def weights(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in (folder / "checkpoints").rglob("*.safetensors")
    }


def assert_same_run(folder, other):
    assert numbers(folder) == numbers(other)
    assert episodes(folder) == episodes(other)
    assert weights(folder) == weights(other) != {}


def wait_for_no_process(folder):
    wait_until(lambda: not servers_of(folder), "the end of all processes of the run")


def workers_of(folder):
    """Return the processes of the rollout workers, which work in the folder of the run."""
    found = []
    for process in servers_of(folder):
        with suppress(psutil.Error):  # it has just ended
            if any("RolloutWorker" in part for part in process.cmdline()):
                found.append(process)
    return found


def has_trained(folder):
    path = folder / "runs" / "smoke" / "0001" / "metrics.jsonl"
    return path.exists() and any(line["stage"] == "grpo" for line in read_metrics(path))


def test_a_run_on_a_cluster_is_that_of_one_machine(cluster, alone, tmp_path):
    command = Command(tmp_path, *TRAIN, *by_ray(cluster))
    try:
        wait_until(lambda: len(workers_of(tmp_path)) == 2, "two workers", command)
        assert command.wait() == 0, command.err
    finally:
        command.kill()
    assert_same_run(tmp_path / "runs" / "smoke" / "0001", alone)
    assert "Ray" not in command.err + command.out  # nothing of Ray's own is printed
    wait_for_no_process(tmp_path)


def ranks_of(folder):
    """Return the processes of the learner's ranks that Ray has placed."""
    return [process for process in servers_of(folder) if is_rank(process)]


def is_rank(process):
    with suppress(psutil.Error):  # it has just ended
        return any("ray::Worker" in part for part in process.cmdline())
    return False


def test_a_learner_on_two_nodes_is_that_of_one_and_outlives_a_lost_rank(cluster, alone, tmp_path):
    """The run, its second rank and its worker are on three nodes. The rank is killed after the
    first step."""
    given = (*ON_TWO_NODES, WHOLE_NODE, "cluster.max_restarts=1")
    command = Command(tmp_path, *TRAIN, *by_ray(cluster, *given))
    try:
        wait_until(lambda: has_trained(tmp_path), "a step", command, limit_s=3 * LIMIT_S)
        (rank,), (worker,) = ranks_of(tmp_path), workers_of(tmp_path)
        assert rank.ppid() != worker.ppid()
        rank.kill()
        assert command.wait(timeout=3 * LIMIT_S) == 0, command.err
    finally:
        command.kill()
    assert "rank 1 of trainer.devices=2, on node" in command.err
    assert_went_on(tmp_path, command, alone)


def assert_went_on(folder, command, alone):
    """Check that the run went on from a checkpoint, and is that of one process to rounding."""
    assert "the run goes on from its last checkpoint" in command.err
    run_folder = folder / "runs" / "smoke" / "0001"
    for ours, theirs in zip(numbers(run_folder), numbers(alone), strict=True):
        assert ours.pop("stage") == theirs.pop("stage")
        assert ours == pytest.approx(theirs, rel=LOSS_BOUND, abs=LOSS_BOUND)
    played, logprobs = without_logprobs(run_folder)
    expected, logprobs_alone = without_logprobs(alone)
    assert played == expected
    assert logprobs == pytest.approx(logprobs_alone, abs=LOSS_BOUND)
    wait_for_no_process(folder)


def test_a_learner_outlives_the_loss_of_its_second_node(cluster, alone, tmp_path):
    """Every process of the node is killed, Ray's own too; another node takes the rank."""
    nodes = [add_node(cluster, 4) for _ in range(2)]  # the others have no room for the rank
    given = (*ON_TWO_NODES, "cluster.cpus_per_rank=3", "cluster.max_restarts=1")
    command = Command(tmp_path, *TRAIN, *by_ray(cluster, *given))
    try:
        wait_until(lambda: has_trained(tmp_path), "a step", command, limit_s=3 * LIMIT_S)
        (rank,) = ranks_of(tmp_path)
        lost = next(node for node in nodes if raylet_of(node) == rank.ppid())
        nodes.remove(lost)
        with command.paused():
            cluster.remove_node(lost, allow_graceful=False)
            wait_until(lambda: not rank.is_running(), "the end of the rank")
        assert command.wait(timeout=3 * LIMIT_S) == 0, command.err
    finally:
        command.kill()
        for node in nodes:
            cluster.remove_node(node)
    assert_went_on(tmp_path, command, alone)


def raylet_of(node):
    """Return the process id of the part of Ray that starts the node's processes."""
    return node.all_processes["raylet"][0].process.pid


def test_shards_on_two_nodes_give_the_losses_of_one_process(cluster, tmp_path):
    """They are published through a folder that only this process sees, as of another machine."""
    given = by_ray(cluster, *ON_TWO_NODES, "trainer.parallel=fsdp")
    samples, seen = random_samples(3, count=7), []
    for more in (("trainer.devices=1",), given):
        config = compose(["conf=smoke", *SMALL, *more]).config
        nodes = build_cluster(config).ranks(CPU, tmp_path)
        devices = build_devices(config, CPU, tmp_path, 1, nodes)
        try:
            policy, _ = devices.load_policy(None)
            learner = devices.learner(policy)
            seen.append([learner.update(samples, step) for step in (1, 2)])
            if nodes:
                assert_published_here(devices.weights(policy), tmp_path)
        finally:
            devices.close()
    for ones, twos in zip(*seen, strict=True):
        losses = {key: value for key, value in ones.items() if key.startswith("loss/")}
        assert losses and {key: twos[key] for key in losses} == pytest.approx(
            losses, rel=LOSS_BOUND, abs=LOSS_BOUND
        )


def assert_published_here(publication, folder):
    descriptor = os.open(folder, os.O_RDONLY)  # other processes do not have it
    try:
        publication.write_weights(Path(f"/proc/self/fd/{descriptor}") / "published")
    finally:
        os.close(descriptor)
    written = load_file(folder / "published" / "model.safetensors")
    wanted = publication.tensors()
    assert written.keys() == wanted.keys()
    for name, values in written.items():
        assert torch.equal(values, wanted[name].full_tensor()), name


def test_a_lost_node_changes_nothing(cluster, alone, tmp_path):
    """The workers of the node are replaced on another one, and play its episodes again."""
    node = add_node(cluster, 2)
    command = Command(tmp_path, *TRAIN, *by_ray(cluster))
    try:
        wait_until(lambda: workers_of(tmp_path), "a worker", command)
        workers = wait_until(
            lambda: has_trained(tmp_path) and workers_of(tmp_path), "a step", command
        )
        with command.paused():
            workers[0].kill()  # a worker alone, wherever it is, and then a node
            cluster.remove_node(node, allow_graceful=False)
        assert command.wait() == 0, command.err
    finally:
        command.kill()
    assert_same_run(tmp_path / "runs" / "smoke" / "0001", alone)
    wait_for_no_process(tmp_path)


def test_workers_that_are_lost_too_often_end_the_run(cluster, tmp_path):
    command = Command(tmp_path, *TRAIN, *by_ray(cluster, "cluster.max_restarts=0"))
    try:
        workers = wait_until(
            lambda: has_trained(tmp_path) and workers_of(tmp_path), "a step", command
        )
        workers[0].kill()
        assert command.wait() == 1
    finally:
        command.kill()
    assert "rollout worker" in command.err
    assert "cluster.max_restarts=0" in command.err
    wait_for_no_process(tmp_path)


async def test_a_cluster_without_room_says_what_is_missing(cluster, tmp_path):
    given = by_ray(cluster, "cluster.cpus_per_worker=64", "cluster.start_timeout_s=2")
    workers = RolloutWorkers(compose(["conf=smoke", *given]).config, tmp_path)
    try:
        with pytest.raises(HostError) as caught:
            await workers.start()
    finally:
        await workers.close()
    assert "cluster.cpus_per_worker=64" in str(caught.value)
    # A node that an earlier test has lost may still be counted.
    assert re.search(r"of [46] cores are free on [34] nodes", str(caught.value))


async def test_a_process_that_ray_gives_to_a_lost_node_is_placed_again(cluster):
    """Two nodes have the room for one process each; one is killed, and takes its place later."""

    class Process:
        async def node(self):
            return "a node"

    nodes = [add_node(cluster, 4) for _ in range(2)]
    connection = Nodes(cluster.address)
    try:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        placed = [
            connection.place(Process, num_cpus=3, name=f"process {number}") for number in (1, 2)
        ]
        waiting = [
            asyncio.create_task(
                connection.wait_for_node(process, LIMIT_S, needs="3 cores", advice="nothing")
            )
            for process in placed
        ]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        nodes.append(add_node(cluster, 4))
        assert await asyncio.gather(*waiting) == ["a node"] * 2
        for process in placed:
            process.kill()
    finally:
        connection.close()
        for node in nodes:
            cluster.remove_node(node)


def test_a_learner_without_room_says_what_is_missing(cluster):
    given = by_ray(cluster, "cluster.cpus_per_rank=64", "cluster.start_timeout_s=2")
    settings = compose(["conf=smoke", *given, *ON_TWO_NODES]).config.cluster
    ranks = RayRanks(settings, CPU)
    try:
        with pytest.raises(HostError, match=r"needs 1 nodes besides this machine.*per_rank=64"):
            ranks.start(f"{WORKER}:Worker", 2, num_threads=1)
    finally:
        ranks.close()


def test_a_node_without_the_run_folder_is_named(cluster, tmp_path):
    """All ranks of a sharded policy write checkpoints."""
    settings = compose(["conf=smoke", *by_ray(cluster, *ON_TWO_NODES)]).config.cluster
    ranks = RayRanks(settings, CPU, tmp_path / "not there")
    try:
        with pytest.raises(ConfigError, match=r"does not have .*not there: .*set runs_dir to"):
            ranks.start(f"{WORKER}:Worker", 2, num_threads=1)
    finally:
        ranks.close()


def test_check_says_what_fits_and_starts_the_workers(cluster):
    given = by_ray(cluster, *ON_TWO_NODES, "cluster.rollout_workers=2")
    room, started, learner = try_cluster(compose(["conf=smoke", *SMALL, *given]).config)
    assert [line.result for line in (room, started, learner)] == [Result.OK] * 3
    assert "add up 16 MiB in" in learner.text
    assert room.text.startswith("room for 4 rollout workers")
    assert started.text.startswith("16 sessions opened by the rollout workers")
    large = compose(["conf=smoke", *by_ray(cluster, "cluster.cpus_per_worker=3")]).config
    (line,) = try_cluster(large)
    assert line.result is Result.WARN and line.text.startswith("room for 0 of 2 rollout workers")


def test_an_address_without_a_cluster_is_told():
    pytest.importorskip("ray")
    with pytest.raises(HostError, match=r"cluster.address=127\.0\.0\.1:9: .*`ray start --head`"):
        Nodes("127.0.0.1:9")


def test_a_sweep_is_placed_as_there_is_room_and_goes_on_after_a_stop(cluster, tmp_path):
    """Each of two nodes has room for two of eight jobs."""
    jobs = ("sweep.ray.cpus_per_job=1", "seed=range(0,8)")
    given = (f"sweep.ray.address={cluster.address}", *jobs)
    steps = ("trainer.steps=2", "trainer.checkpoint.every=1", "eval.baselines=false")
    command = Command(tmp_path, "train", "-m", *TINY, *steps, *given)
    files = tmp_path / "runs" / "sweeps"
    code = ended_by(
        signal.SIGINT, command, lambda: len(list(files.glob("*/jobs/*.json"))) >= 4, "four jobs"
    )
    assert code == 128 + signal.SIGINT, command.err
    sweep = sweep_of(tmp_path)
    assert sweep["status"] == "interrupted"
    assert "waiting" in [job["status"] for job in sweep["jobs"]]
    command = Command(tmp_path, "train", "-m", "--resume", str(sweep["path"]))
    try:
        _, err = command.communicate(timeout=900)
        assert command.returncode == 0, err
    finally:
        command.kill()
    sweep = sweep_of(tmp_path)
    assert [job["status"] for job in sweep["jobs"]] == ["finished"] * 8
    assert most_at_once(runs_of(tmp_path)) <= 4
    wait_for_no_process(tmp_path)


def most_at_once(runs):
    """Return how many runs worked at the same time, at most."""
    attempts = [attempt for run in runs for attempt in run.record.attempts]
    return max(
        sum(other.started <= attempt.started < other.ended for other in attempts)
        for attempt in attempts
    )


def test_a_lost_head_ends_the_run_in_words(cluster, tmp_path):
    """The last test: no run can use the cluster after it."""
    address = cluster.address
    long = ("trainer.steps=100000", "trainer.checkpoint.every=100000")
    command = Command(tmp_path, *TRAIN, *long, *by_ray(cluster))
    try:
        wait_until(lambda: has_trained(tmp_path), "a step", command)
        cluster.head_node.kill_gcs_server(check_alive=False)
        assert command.wait() == 1, command.err
    finally:
        command.kill()
    assert f"the head of the Ray cluster at {address} does not answer" in command.err
    wait_for_no_process(tmp_path)
