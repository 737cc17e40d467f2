"""The parts of `host=docker` that need no daemon."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.environments.hosts.package import code_digest
from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.extras.containers.docker import image
from openenv_pipe.extras.containers.docker.daemon import connect, daemon_address
from openenv_pipe.extras.containers.docker.guarded import GuardedDaemon
from openenv_pipe.extras.containers.docker.host import (
    container_options,
    declared_port,
    exposed_port,
)
from openenv_pipe.extras.containers.docker.image import Image, image_recipe, prepare_image
from openenv_pipe.extras.containers.docker.running import SOCKET_PROXY, cause_of_death
from tests.docker_daemon import BrokenDaemonError, NoDaemonError, answering
from tests.ports import lasting_port

pytestmark = pytest.mark.slow

LIMIT_S = 60.0  # waits for what takes a moment on an idle machine


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "parrot"
    (folder / "server").mkdir(parents=True)
    (folder / "openenv.yaml").write_text("app: server.app:app\nport: 9000\n")
    (folder / "server" / "Dockerfile").write_text("FROM scratch\n")
    (folder / ".dockerignore").write_text("# not these\n*.md\n")
    return folder


def settings(package=None, env=None, **host):
    config = compose(["conf=smoke", "host=docker"]).config
    name = None if package is None else str(package)
    return (
        config.env.model_copy(update={"package": name, "name": "My Parrot", **(env or {})}),
        config.host.model_copy(update=host),
    )


def options(env=None, start=("serve", "--all"), **host):
    image = Image("parrot:1", "sha256:1", start, ())
    daemon = GuardedDaemon(Path("/logs"))
    daemon.image, daemon.labels = image, {"run": "7"}
    return container_options(*settings(env=env, **host), daemon, 9000, Path("/f/0"))


# --- the image and its port --------------------------------------------------------------------


def test_the_tag_follows_what_the_build_sees(package):
    def name(**host):
        return image_recipe(*settings(package, **host)).name

    before = name()
    assert before.startswith("openenv-pipe/my-parrot:")
    (package / "notes.md").write_text("ignored")
    assert name() == before
    assert name(build_args={"BASE_IMAGE": "other"}) != before
    (package / "server" / "app.py").write_text("app = None")
    assert name() != before


class Daemon:
    """A daemon that is asked for nothing."""

    def close(self):
        pass


def test_an_image_that_cannot_be_built_leaves_no_folder(package, tmp_path, monkeypatch):
    """Without the `docker` command there is no log, so nothing is kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(image, "connect", Daemon)
    monkeypatch.setattr(image, "find_image", lambda client, name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the `docker` command"):
        asyncio.run(prepare_image(image_recipe(*settings(package)), LIMIT_S, lambda _: None))
    assert not list((tmp_path / "temporary").iterdir())


def test_a_build_is_told_all_that_the_block_says(package):
    arguments = image_recipe(*settings(package, build_args={"BASE_IMAGE": "mine:1"})).arguments
    assert arguments[0] == "build"
    assert "--build-arg=BASE_IMAGE=mine:1" in arguments
    assert arguments[-1] == str(package)


def test_a_named_image_is_pulled_not_built():
    recipe = image_recipe(*settings(image="registry/parrot:1"))
    assert (recipe.name, recipe.arguments) == ("registry/parrot:1", ("pull", "registry/parrot:1"))


def test_nothing_to_build_from_is_rejected(package):
    with pytest.raises(ConfigError, match=r"env\.package .*host\.image"):
        image_recipe(*settings())
    with pytest.raises(ConfigError, match=r"there is no .*/Containerfile; .*host\.dockerfile"):
        image_recipe(*settings(package, dockerfile="Containerfile"))


def test_the_port_is_the_blocks_or_the_manifests(package):
    assert declared_port(*settings(package)) == 9000
    assert declared_port(*settings(package, container_port=80)) == 80
    assert declared_port(*settings()) is None
    (package / "openenv.yaml").write_text("name: an older manifest\n")
    assert declared_port(*settings(package)) is None
    (package / "openenv.yaml").write_text("port: http\n")
    with pytest.raises(ConfigError, match="port is 'http', expected a number"):
        declared_port(*settings(package))


@pytest.mark.parametrize(("ports", "seen"), [((), "no port"), ((80, 8000), "80, 8000")])
def test_a_port_that_nobody_names_is_the_one_that_the_image_exposes(ports, seen):
    assert exposed_port(Image("parrot:1", "sha256:1", (), (7860,))) == 7860
    with pytest.raises(ConfigError, match=rf"parrot:1 exposes {seen}, .*host\.container_port"):
        exposed_port(Image("parrot:1", "sha256:1", (), ports))


def test_the_digest_of_code_knows_no_caches(package):
    before = code_digest(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "app.pyc").write_text("cache")
    assert code_digest(package) == before
    (package / "app.py").write_text("app = None")
    assert code_digest(package) != before


# --- the container -----------------------------------------------------------------------------


def test_without_a_network_the_image_starts_behind_the_proxy():
    made = options()
    assert made["network_mode"] == "none"
    assert "ports" not in made
    words = made["entrypoint"] + made["command"]
    assert words[:4] == ["python3", "-I", "-S", "-c"]
    assert words[5:] == ["/run/openenv-pipe/server", "9000", "serve", "--all"]


def test_on_a_bridge_the_image_starts_as_it_is():
    made = options(network="bridge")
    assert made["entrypoint"] + made["command"] == ["serve", "--all"]
    assert made["ports"] == {"9000/tcp": ("127.0.0.1", None)}
    assert "mounts" not in made and "network_mode" not in made


def test_a_command_replaces_the_images():
    made = options({"command": ["run", "{host}:{port}", "{}"]}, network="bridge")
    assert made["entrypoint"] + made["command"] == ["run", "0.0.0.0:9000", "{}"]
    with pytest.raises(ConfigError, match=r"ENTRYPOINT nor CMD; set env\.command"):
        options(start=())


def test_variables_labels_and_limits_are_passed_on(monkeypatch):
    monkeypatch.setenv("OURS", "stays here")
    made = options({"variables": {"MOOD": "merry"}}, sessions_per_server=3, cpus=0.5)
    assert made["environment"] == {
        "MAX_CONCURRENT_ENVS": "3",
        "PYTHONUNBUFFERED": "1",
        "MOOD": "merry",
    }
    assert made["labels"] == {"run": "7"}
    assert made["nano_cpus"] == 500_000_000


def test_gpus_are_asked_for_by_number_or_all_at_once():
    (every,) = options(gpus="all")["device_requests"]
    (some,) = options(gpus=["0", "2"])["device_requests"]
    assert every["Count"] == -1
    assert some["DeviceIDs"] == ["0", "2"]
    assert "device_requests" not in options()


def test_a_death_for_want_of_memory_names_the_key():
    limit = "host.mem_limit_mb=64"
    assert cause_of_death({"ExitCode": 3, "OOMKilled": False}, limit) == "exit code 3"
    assert limit in cause_of_death({"ExitCode": 137, "OOMKilled": True}, limit)


# --- the daemon and owner labels ----------------------------------------------------------------


def test_a_daemon_elsewhere_is_rejected(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    with pytest.raises(ConfigError, match="not a socket of this machine"):
        daemon_address()


def test_a_daemon_that_does_not_answer_is_told_with_the_next_step(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(HostError, match=r"none\.sock: .*systemctl start docker"):
        connect()


# --- the socket proxy --------------------------------------------------------------------------

ECHO = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = server.accept()
    while data := connection.recv(65536):
        connection.sendall(data.upper())
    connection.close()
"""


@pytest.fixture
def behind_the_proxy(tmp_path):
    """Return a function that starts a program behind the proxy and returns process and socket."""
    started = []

    def start(program, port):
        path = f"/tmp/proxy-{os.getpid()}-{port}"  # the path of a Unix socket has to be short
        command = [sys.executable, "-I", "-S", "-c", SOCKET_PROXY.read_text(), path, str(port)]
        process = subprocess.Popen([*command, sys.executable, "-c", program, str(port)])
        started.append((process, path))
        return process, path

    yield start
    for process, path in started:
        process.terminate()
        process.wait(LIMIT_S)
        Path(path).unlink(missing_ok=True)


async def opened(path):
    """Return a connection through the proxy to a server that answers."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            await asyncio.sleep(0.05)
            if not Path(path).exists():
                continue
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"hello")
            with suppress(OSError):
                if await reader.read(100) == b"HELLO":
                    return reader, writer
            await closed(writer)


async def closed(writer):
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def test_the_proxy_passes_on_what_comes_and_the_end_of_it(behind_the_proxy):
    process, path = behind_the_proxy(ECHO, lasting_port())
    reader, writer = await opened(path)
    large = b"abc" * 1_000_000
    writer.write(large)
    assert await asyncio.wait_for(reader.readexactly(len(large)), LIMIT_S) == large.upper()
    await closed(writer)
    # the server plays with one client at a time, so it has seen the first connection close
    _, second = await opened(path)
    await closed(second)
    process.terminate()
    assert await asyncio.to_thread(process.wait, LIMIT_S) == 128 + 15


@pytest.mark.parametrize(
    ("program", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_proxy_ends_as_the_server_does(behind_the_proxy, program, code):
    process, _ = behind_the_proxy(program, lasting_port())
    assert process.wait(LIMIT_S) == code


def test_a_server_that_cannot_be_started_is_named(tmp_path):
    command = [sys.executable, str(SOCKET_PROXY), str(tmp_path / "server"), "1", "no-such-program"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 127
    assert "no-such-program" in done.stderr


def test_who_connects_too_early_is_sent_away(behind_the_proxy):
    process, path = behind_the_proxy("import time; time.sleep(600)", lasting_port())
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(LIMIT_S)
        while client.connect_ex(path):  # the proxy does not listen yet
            assert process.poll() is None
            time.sleep(0.01)
        assert client.recv(1) == b""


# --- the Docker daemon of the tests --------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("failed to mount overlay: operation not permitted", NoDaemonError),
        ("iptables v1.8.9: Could not fetch rule set generation id", NoDaemonError),
        ("process with PID 7 is still running", BrokenDaemonError),
    ],
)
def test_a_daemon_that_the_machine_forbids_is_told_from_a_broken_one(tmp_path, said, error):
    log = tmp_path / "dockerd.log"
    log.write_text(said)
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    ended.wait()
    with pytest.raises(error, match=said[:20]):
        answering(ended, log)
