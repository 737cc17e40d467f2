"""`DockerHost` with a real daemon: limits, deaths, orphans, and a whole run of Wordle.

Most containers here run PROBE, which starts at once and evaluates expressions that a test sends.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError, HostError, SessionClosedError
from openenv_pipe.extras.containers.docker.daemon import LOGS, OWNER, owned_containers
from openenv_pipe.extras.containers.docker.host import DockerHost
from openenv_pipe.extras.containers.docker.image import image_recipe
from openenv_pipe.extras.lab.inspect import inspect_environment
from openenv_pipe.extras.lab.targets import find_target
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.process_id import ProcessId
from tests.commands import SMALL, Command, run, wait_until
from tests.docker_daemon import BASE_IMAGE
from tests.stub_server import started, stub_command

pytestmark = pytest.mark.docker

PROBE = """
import socket

async def answer(data, number, seed):
    try:
        value = eval(data.get("run", "None"))
    except OSError as error:
        value = str(error)
    return {"observation": {"value": value}}

exec(sys.argv[3])
print("listening", flush=True)
"""
BEGIN_AND_WAIT = """
import time
open("/run/openenv-pipe/begun", "w").close()
while not os.path.exists("/run/openenv-pipe/go"):
    time.sleep(0.05)
"""
LIMIT_S = 240.0  # waits for what takes seconds on an idle machine
ON_WORDLE = ("host=docker", f"host.build_args.BASE_IMAGE={BASE_IMAGE}")


@pytest.fixture(autouse=True)
def nothing_is_left(docker_client, tmp_path, monkeypatch):
    """Assert that no container and no folder of sockets is left."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield
        assert socket_folders() == []
    assert owned_containers(docker_client) == []


def socket_folders():
    return list(Path(tempfile.gettempdir()).glob("openenv-pipe-*"))


def files_of_containers(name):
    """Return the files of this name that lie beside the containers' sockets."""
    return [path for folder in socket_folders() for path in folder.glob(f"*/{name}")]


def probe(at_start="pass", env=None, **host):
    """Return settings for containers that run PROBE."""
    config = compose(["conf=smoke", "host=docker"]).config
    source = stub_command(PROBE)[2]
    command = ["python3", "-c", source, "{host}", "{port}", at_start]
    small = {"image": BASE_IMAGE, "sessions_per_server": 2, "mem_limit_mb": 128}
    patient = {"command": command, "reset_timeout_s": LIMIT_S}
    return (
        config.env.model_copy(update={**patient, **(env or {})}),
        config.host.model_copy(
            update={**small, "start_timeout_s": LIMIT_S, "max_restarts": 0, **host}
        ),
    )


def running(parts, log_dir):
    return started(DockerHost(*parts, log_dir))


async def evaluated(session, text):
    return (await session.step({"run": text}, LIMIT_S)).observation["value"]


# --- what a container may do -------------------------------------------------------------------


async def test_a_container_has_limits_labels_and_no_way_out(docker_client, tmp_path):
    variables = {"MOOD": "merry"}
    parts = probe(env={"variables": variables}, cpus=0.5, pids_limit=64, tmp_mb=8)
    async with running(parts, tmp_path) as host, host.session() as session:
        (owned,) = owned_containers(docker_client)
        assert owned.owner == ProcessId.of_this_process()
        assert owned.container.labels[LOGS] == str(tmp_path)
        limits = owned.container.attrs["HostConfig"]
        assert limits["Memory"] == limits["MemorySwap"] == 128 * 2**20
        assert (limits["NanoCpus"], limits["PidsLimit"]) == (500_000_000, 64)
        assert limits["CapDrop"] == ["ALL"]
        assert limits["SecurityOpt"] == ["no-new-privileges"]
        assert limits["ReadonlyRootfs"] and limits["Init"]
        assert limits["NetworkMode"] == "none"

        assert await evaluated(session, "os.environ['MOOD']") == "merry"
        assert await evaluated(session, "os.environ['MAX_CONCURRENT_ENVS']") == "2"
        assert await evaluated(session, "[name for _, name in socket.if_nameindex()]") == ["lo"]
        # Docker's bridge, which is this machine, and a distant host
        for address in ("172.17.0.1", "192.0.2.1"):
            connect = f"socket.create_connection(('{address}', 80), 3).close()"
            assert "unreachable" in await evaluated(session, connect)
        assert "Read-only" in await evaluated(session, "open('/file', 'w').close()")
        assert await evaluated(session, "open('/tmp/file', 'w').write('text')") == 4
        status = await evaluated(session, "open('/proc/self/status').read()")
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert host.facts()["image"]["id"].startswith("sha256:")
    assert "listening" in (tmp_path / "env-0.log").read_text()


async def test_a_bridge_is_published_on_the_loopback_alone(docker_client, tmp_path):
    async with running(probe(network="bridge"), tmp_path) as host, host.session() as session:
        assert host.urls[0].startswith("http://127.0.0.1:")
        (owned,) = owned_containers(docker_client)
        (published,) = owned.container.attrs["NetworkSettings"]["Ports"]["8000/tcp"]
        assert published["HostIp"] == "127.0.0.1"
        assert "eth0" in await evaluated(session, "[name for _, name in socket.if_nameindex()]")


# --- starting ----------------------------------------------------------------------------------


async def test_containers_start_side_by_side(tmp_path):
    """No container answers before all of them have started."""
    host = DockerHost(*probe(BEGIN_AND_WAIT, num_servers=3), tmp_path)
    starting = asyncio.create_task(host.start())
    try:
        async with asyncio.timeout(LIMIT_S):
            while len(begun := files_of_containers("begun")) < 3:
                assert not starting.done(), starting.exception()
                await asyncio.sleep(0.05)
        for path in begun:
            path.with_name("go").touch()
        await starting
        assert len(set(host.urls)) == 3
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await host.close()


async def test_a_container_that_ends_at_start_is_noticed_at_once_and_quoted(tmp_path):
    parts = probe("sys.exit('cannot find the dictionary')", start_timeout_s=100 * LIMIT_S)
    with pytest.raises(HostError, match="exit code 1") as caught:
        async with asyncio.timeout(LIMIT_S), running(parts, tmp_path):
            pass
    assert "cannot find the dictionary" in str(caught.value)
    assert caught.value.log == tmp_path / "env-0.log"


@pytest.mark.parametrize("network", ["none-outbound", "bridge"])
async def test_too_little_memory_is_named(tmp_path, network):
    parts = probe("bytearray(2**30)", mem_limit_mb=64, network=network)
    with pytest.raises(HostError, match=r"out of memory: host\.mem_limit_mb=64"):
        async with running(parts, tmp_path):
            pass


async def test_a_server_that_never_answers_is_given_up(tmp_path):
    parts = probe("import time; time.sleep(600)", start_timeout_s=2.0, stop_timeout_s=1.0)
    with pytest.raises(HostError, match="within 2 s"):
        async with running(parts, tmp_path):
            pass


async def test_a_cancelled_start_leaves_nothing(tmp_path):
    host = DockerHost(*probe("import time; time.sleep(600)", stop_timeout_s=1.0), tmp_path)
    starting = asyncio.create_task(host.start())
    await asyncio.sleep(1.5)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_an_image_that_cannot_be_pulled_is_told_with_dockers_words(tmp_path):
    with pytest.raises(HostError, match=r"docker pull` of localhost:1.*\n.*connection refused"):
        async with running(probe(image="localhost:1/none:1"), tmp_path):
            pass


async def test_a_failed_build_shows_its_last_lines(tmp_path):
    package = tmp_path / "broken"
    (package / "server").mkdir(parents=True)
    (package / "openenv.yaml").write_text("app: server.app:app\nport: 8000\n")
    dockerfile = f"FROM {BASE_IMAGE}\nRUN echo the compiler is missing && exit 3\n"
    (package / "server" / "Dockerfile").write_text(dockerfile)
    with pytest.raises(HostError, match="docker build` of openenv-pipe/wordle:") as caught:
        async with running(probe(env={"package": str(package)}, image=None), tmp_path):
            pass
    assert "the compiler is missing" in str(caught.value)
    assert caught.value.log == tmp_path / "docker.log"


def test_an_image_is_inspected_by_its_name_alone(docker_client):
    built = find_target("wordle", [*ON_WORDLE, f"host.start_timeout_s={LIMIT_S}"])
    inspect_environment(built, None)
    name = image_recipe(built.serving.env, built.serving.host).name
    text = inspect_environment(find_target(name, [f"host.start_timeout_s={LIMIT_S}"]), None).block
    assert f"# To start it: host=docker host.image={name}\n" in text
    assert '"guess": string' in text and "(?P<guess>" in text
    with pytest.raises(ConfigError, match=r"exposes no port, .*host\.container_port"):
        inspect_environment(find_target(BASE_IMAGE, []), None)


# --- containers that die, and orphans ------------------------------------------------------------


async def test_a_dead_container_is_replaced_until_the_restarts_are_used_up(docker_client, tmp_path):
    async with running(probe(max_restarts=1), tmp_path) as host:
        (first,) = owned_containers(docker_client)
        async with host.session() as session:
            with pytest.raises(SessionClosedError):
                await evaluated(session, "os._exit(9)")
        async with asyncio.timeout(LIMIT_S), host.session() as session:
            await session.reset({}, LIMIT_S)
            (second,) = owned_containers(docker_client)
            assert second.container.id != first.container.id
            await asyncio.to_thread(second.container.kill)
            with pytest.raises(SessionClosedError):
                await session.step({}, LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(HostError, match=r"host.max_restarts=1 .*exit code 137"):
                async with host.session():
                    pass


def orphan(client, **changes):
    """Leave behind a container whose owner process has died."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    owner = ProcessId(**{**ProcessId.of_this_process().model_dump(), "pid": dead.pid, **changes})
    dead.wait()
    return client.containers.create(BASE_IMAGE, "sleep 60", labels={OWNER: owner.model_dump_json()})


async def test_a_start_removes_what_dead_runs_left_and_nothing_else(docker_client, tmp_path):
    dead = orphan(docker_client)
    elsewhere = orphan(docker_client, host="another-machine")
    not_ours = docker_client.containers.create(BASE_IMAGE, "sleep 60")
    try:
        async with running(probe(), tmp_path):
            left = {container.id for container in docker_client.containers.list(all=True)}
            assert dead.id not in left
            assert {elsewhere.id, not_ours.id} <= left
    finally:
        elsewhere.remove(force=True)
        not_ours.remove(force=True)


def test_prune_removes_the_containers_of_dead_runs(docker_client, tmp_path):
    dead = orphan(docker_client)
    code, out, err = run(tmp_path, "prune", "--dry-run")
    assert code == 0, err
    assert f"would be removed: container {dead.name}" in out
    _, out, _ = run(tmp_path, "prune")
    assert f"removed: container {dead.name}" in out
    assert owned_containers(docker_client) == []


def processor_s(container):
    """Return the processor time that the container has used, in seconds."""
    seen = container.client.api.stats(container.id, stream=False, one_shot=True)
    return seen["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9


def is_at_rest(pid):
    """Return whether all threads of the process sleep in each of 20 samples within a second."""
    for _ in range(20):
        with contextlib.suppress(OSError):  # a thread may end between listing and reading
            stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
            if any(stat.rpartition(")")[2].split()[0] != "S" for stat in stats):
                return False
        time.sleep(0.05)
    return True


def test_a_run_goes_on_after_its_container_was_killed(docker_client, tmp_path):
    # Steps are long and every reply goes to the environment, so that most sessions wait for it at
    # any time.
    long_steps = ("trainer.steps=3", "trainer.tasks_per_step=8", "trainer.group_size=8")
    any_reply = "env.adapter.pattern='(?s)(?P<guess>.*)'"
    process = Command(tmp_path, "train", "conf=smoke", *long_steps, any_reply, *ON_WORDLE, *SMALL)
    folder = tmp_path / "runs" / "smoke" / "0001"
    try:
        metrics = folder / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and "grpo" in metrics.read_text(), "a step", process)
        (first,) = owned_containers(docker_client)
        before_s = processor_s(first.container)
        wait_until(
            lambda: processor_s(first.container) > before_s + 0.02, "the next step's play", process
        )
        first.container.pause()
        wait_until(lambda: is_at_rest(process.pid), "episodes that all wait for it", process)
        first.container.kill()
        _, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, err
    image = RunFolder.open(folder).record.facts["image"]
    assert image["name"].startswith("openenv-pipe/wordle:")
    steps = [record for record in read_metrics(metrics) if record["stage"] == "grpo"]
    assert len(steps) == 3
    assert sum(record["episodes/failed"] for record in steps) > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_run_that_is_ended(docker_client, tmp_path, number):
    process = Command(tmp_path, "train", "conf=smoke", "trainer.steps=500", *ON_WORDLE, *SMALL)
    try:
        wait_until(lambda: owned_containers(docker_client), "the container", process)
        process.send_signal(number)
        process.communicate()
    finally:
        process.kill()
    wait_until(lambda: owned_containers(docker_client) == [], "the container's end")
    wait_until(lambda: socket_folders() == [], "the end of the sockets' folder")
    record = json.loads((tmp_path / "runs/smoke/0001/run.json").read_text())
    assert record["status"] == ("running" if number == signal.SIGKILL else "interrupted")
