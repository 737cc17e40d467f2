"""One environment server in a container: what it may do, its log, its death.

Refused here: capabilities, new privileges, swap, restarts by Docker itself, and Docker's own health
checks, which would start a process inside every few seconds.
"""

import asyncio
import math
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
from docker.models.containers import Container
from docker.types import DeviceRequest, LogConfig, Mount

from openenv_pipe.environments.hosts.docker.daemon import DaemonErrors, explained, in_thread, remove
from openenv_pipe.environments.hosts.docker.image import Image
from openenv_pipe.environments.hosts.health import wait_until_healthy
from openenv_pipe.environments.hosts.process import filled_in, server_environment
from openenv_pipe.errors import ConfigError, HostError

if TYPE_CHECKING:
    from openenv_pipe.config.schema import DockerHostConfig, EnvConfig

DOORWAY = Path(__file__).with_name("socket_proxy.py")
DOOR = "door"  # the socket's name in the folder that container and host share
SHARED_FOLDER = "/run/openenv-pipe"  # as the container sees it
LOOPBACK = "127.0.0.1"
FOLLOW_LIMIT_S = 5.0  # what the log of an ended container may take to end


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What the servers of one host have in common once it starts."""

    client: docker.DockerClient
    image: Image
    port: int  # in the container
    folder: Path  # of the sockets
    labels: Mapping[str, str]


class DockerServer:
    """See `hosts.base.Server`. `place` has to be set before the start."""

    def __init__(self, env: "EnvConfig", config: "DockerHostConfig", index: int, log: Path) -> None:
        self.log = log
        self.url = ""
        self.place: Place | None = None
        self._env = env
        self._config = config
        self._index = index
        self._container: Container | None = None
        self._follower: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._cause = ""

    async def start(self) -> None:
        """See `Server.start`. A container that ends is noticed at once, with its last lines."""
        self._ended = asyncio.Event()
        try:
            await in_thread(self._launch, asyncio.get_running_loop())
            self.url = await self._find_url()
            await wait_until_healthy(self.url, self._config.start_timeout_s, self.died())
        except HostError as error:
            await self.stop()
            raise HostError(f"env {self._env.name!r}: {error}", self.log) from error
        except DaemonErrors as error:
            await self.stop()
            raise HostError(
                f"env {self._env.name!r}: Docker starts no container: {explained(error)}"
            ) from error
        except BaseException:
            await self.stop()
            raise

    async def died(self) -> str:
        await self._ended.wait()
        return self._cause

    async def stop(self) -> None:
        """See `Server.stop`. What the daemon refuses to remove now, a later command removes."""
        container, self._container = self._container, None
        if container is not None:
            await in_thread(self._end, container)
        if self._follower is not None:
            await asyncio.to_thread(self._follower.join, FOLLOW_LIMIT_S)

    def _launch(self, loop: asyncio.AbstractEventLoop) -> None:
        place = self.place
        assert place is not None
        shared = place.folder / str(self._index)
        shared.mkdir(exist_ok=True)
        shared.chmod(0o777)  # the image's user is not ours; nobody else comes into place.folder
        (shared / DOOR).unlink(missing_ok=True)
        options = container_options(self._env, self._config, place, shared)
        name = f"openenv-pipe-{self._index}-{uuid.uuid4().hex[:12]}"
        self._container = place.client.containers.create(name=name, **options)
        self._container.start()
        self._follower = threading.Thread(
            target=self._follow,
            args=(self._container, loop, self._ended),
            name=f"follow-{name}",
            daemon=True,
        )
        self._follower.start()

    def _follow(
        self, container: Container, loop: asyncio.AbstractEventLoop, ended: asyncio.Event
    ) -> None:
        """Write the log until the container ends, then say why it did."""
        try:
            with self.log.open("ab", buffering=0) as file:
                for chunk in container.logs(stream=True, follow=True):
                    file.write(chunk)
            container.wait()
            container.reload()
            self._cause = cause_of_death(container.attrs["State"], self._config.mem_limit_mb)
        except Exception as error:  # unwatched is as good as dead, whatever the reason
            self._cause = f"it cannot be watched: {explained(error)}"
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(ended.set)

    async def _find_url(self) -> str:
        place = self.place
        if self._config.network == "none-outbound":
            return f"unix://{place.folder / str(self._index) / DOOR}"
        await in_thread(self._container.reload)
        ports = self._container.attrs["NetworkSettings"]["Ports"].get(f"{place.port}/tcp")
        if not ports:  # as of every container that has ended
            cause = await asyncio.wait_for(self.died(), self._config.start_timeout_s)
            raise HostError(f"the server died before it was ready: {cause}")
        return f"http://{LOOPBACK}:{ports[0]['HostPort']}"

    def _end(self, container: Container) -> None:
        with suppress(*DaemonErrors):
            container.stop(timeout=math.ceil(self._config.stop_timeout_s))
        with suppress(*DaemonErrors):
            remove(container)


def container_options(
    env: "EnvConfig", config: "DockerHostConfig", place: Place, shared: Path
) -> dict[str, Any]:
    """The keywords of `containers.create`, but for the name. Raises ConfigError.

    shared: the folder that a container without a network gets its door in.
    """
    values = {"{port}": str(place.port), "{host}": "0.0.0.0"}
    command = [filled_in(part, values) for part in env.command or place.image.start]
    if not command:
        raise ConfigError(
            f"image {place.image.name} has neither ENTRYPOINT nor CMD; set env.command"
        )
    options: dict[str, Any] = {
        "image": place.image.id,
        "environment": server_environment({}, env.variables, config.sessions_per_server),
        "labels": dict(place.labels),
        "init": True,  # PID 1 that passes signals on and reaps
        "healthcheck": {"test": ["NONE"]},
        "log_config": LogConfig(type="json-file"),  # whatever the daemon's default is, it is read
        "mem_limit": f"{config.mem_limit_mb}m",
        "memswap_limit": f"{config.mem_limit_mb}m",
        "nano_cpus": round(config.cpus * 1e9),
        "pids_limit": config.pids_limit,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "read_only": config.read_only,
        "tmpfs": {"/tmp": f"size={config.tmp_mb}m,mode=1777"},
    }
    if config.gpus:
        which = {"count": -1} if config.gpus == "all" else {"device_ids": list(config.gpus)}
        options["device_requests"] = [DeviceRequest(capabilities=[["gpu"]], **which)]
    if config.network == "bridge":
        options["ports"] = {f"{place.port}/tcp": (LOOPBACK, None)}
    else:
        door = f"{SHARED_FOLDER}/{DOOR}"
        doorway = ["python3", "-I", "-S", "-c", DOORWAY.read_text(), door, str(place.port)]
        command = doorway + command
        options["network_mode"] = "none"
        options["mounts"] = [Mount(SHARED_FOLDER, str(shared), type="bind")]
    return options | {"entrypoint": command[:1], "command": command[1:]}


def cause_of_death(state: Mapping[str, Any], mem_limit_mb: int) -> str:
    """In words, from Docker's `State` of an ended container."""
    cause = f"exit code {state['ExitCode']}"
    if state.get("OOMKilled"):
        cause += f", out of memory: host.mem_limit_mb={mem_limit_mb}"
    return cause
