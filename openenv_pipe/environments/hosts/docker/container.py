"""One environment server in a container: its limits, its log, and how its death is noticed.

Containers get no capabilities, no new privileges and no swap. Docker neither restarts them nor runs
health checks of its own, which would start a process in the container every few seconds.
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
from openenv_pipe.environments.hosts.process import filled_in, server_environment
from openenv_pipe.errors import ConfigError, FailureError, HostError
from openenv_pipe.system.process import log_redactor
from openenv_pipe.system.readiness import unless_dead, wait_until_healthy

if TYPE_CHECKING:
    from openenv_pipe.config.schema import DockerHostConfig, EnvConfig

SOCKET_PROXY = Path(__file__).with_name("socket_proxy.py")
SOCKET = "server"  # the socket's name in the folder that container and host share
SHARED_FOLDER = "/run/openenv-pipe"  # that folder's path in the container
LOOPBACK = "127.0.0.1"
FOLLOW_LIMIT_S = 5.0  # time limit for the rest of the log after the container's end


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerSetup:
    """The settings that the containers of one host share."""

    client: docker.DockerClient
    image: Image
    port: int  # of the server in the container
    folder: Path  # of the sockets
    labels: Mapping[str, str]


class EnvContainer:
    """A `system.supervisor.RestartableServer`. Set `setup` before the start."""

    def __init__(self, env: "EnvConfig", config: "DockerHostConfig", index: int, log: Path) -> None:
        self.log = log
        self.url = ""
        self.setup: ContainerSetup | None = None
        self._env = env
        self._config = config
        self._index = index
        self._container: Container | None = None
        self._follower: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._cause = ""

    async def start(self) -> None:
        """See `RestartableServer.start`. Fails at once if the container ends."""
        self._ended = asyncio.Event()
        try:
            await in_thread(self._launch, asyncio.get_running_loop())
            self.url = await self._find_url()
            healthy = wait_until_healthy(self.url, timeout_s=self._config.start_timeout_s)
            await unless_dead(healthy, self.died())
        except FailureError as error:
            await self.stop()
            raise HostError(f"env {self._env.name!r}: {error}", self.log) from error
        except DaemonErrors as error:
            await self.stop()
            raise HostError(
                f"env {self._env.name!r}: Docker cannot start a container: {explained(error)}"
            ) from error
        except BaseException:
            await self.stop()
            raise

    async def died(self) -> str:
        await self._ended.wait()
        return self._cause

    async def stop(self) -> None:
        """See `RestartableServer.stop`.

        If the daemon does not remove the container now, a later run or command removes it.
        """
        container, self._container = self._container, None
        if container is not None:
            await in_thread(self._end, container)
        if self._follower is not None:
            await asyncio.to_thread(self._follower.join, FOLLOW_LIMIT_S)

    def _launch(self, loop: asyncio.AbstractEventLoop) -> None:
        setup = self.setup
        assert setup is not None
        shared = setup.folder / str(self._index)
        shared.mkdir(exist_ok=True)
        shared.chmod(0o777)  # for the image's user; only this user can open the parent folder
        (shared / SOCKET).unlink(missing_ok=True)
        options = container_options(self._env, self._config, setup, shared)
        name = f"openenv-pipe-{self._index}-{uuid.uuid4().hex[:12]}"
        self._container = setup.client.containers.create(name=name, **options)
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
        """Copy the log until the container ends, then set `ended` and the cause."""
        try:
            with self.log.open("ab", buffering=0) as file:
                redactor = log_redactor()
                for chunk in container.logs(stream=True, follow=True):
                    file.write(redactor.feed(chunk))
                file.write(redactor.end())
            container.wait()
            container.reload()
            self._cause = cause_of_death(container.attrs["State"], self._config.mem_limit_mb)
        except Exception as error:  # a container that cannot be watched counts as dead
            self._cause = f"it cannot be watched: {explained(error)}"
        with suppress(RuntimeError):  # the event loop is closed, so nothing waits for the end
            loop.call_soon_threadsafe(ended.set)

    async def _find_url(self) -> str:
        setup = self.setup
        assert setup is not None
        if self._config.network == "none-outbound":
            return f"unix://{setup.folder / str(self._index) / SOCKET}"
        container = self._container
        assert container is not None
        await in_thread(container.reload)
        ports = container.attrs["NetworkSettings"]["Ports"].get(f"{setup.port}/tcp")
        if not ports:  # a container that has ended has no ports
            cause = await asyncio.wait_for(self.died(), self._config.start_timeout_s)
            raise HostError(f"the server died before it was ready: {cause}")
        return f"http://{LOOPBACK}:{ports[0]['HostPort']}"

    def _end(self, container: Container) -> None:
        with suppress(*DaemonErrors):
            container.stop(timeout=math.ceil(self._config.stop_timeout_s))
        with suppress(*DaemonErrors):
            remove(container)


def container_options(
    env: "EnvConfig", config: "DockerHostConfig", setup: ContainerSetup, shared: Path
) -> dict[str, Any]:
    """Return the keyword arguments of `containers.create` except `name`.

    Args:
        shared: the folder for the socket of a container without a network.

    Raises:
        ConfigError: neither the image nor `env.command` says what to start.
    """
    values = {"{port}": str(setup.port), "{host}": "0.0.0.0"}
    command = [filled_in(part, values) for part in env.command or setup.image.start]
    if not command:
        raise ConfigError(
            f"image {setup.image.name} has neither ENTRYPOINT nor CMD; set env.command"
        )
    options: dict[str, Any] = {
        "image": setup.image.id,
        "environment": server_environment({}, env.variables, config.sessions_per_server),
        "labels": dict(setup.labels),
        "init": True,  # a PID 1 that forwards signals and reaps orphans
        "healthcheck": {"test": ["NONE"]},
        "log_config": LogConfig(type="json-file"),  # the daemon's default may not be readable
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
        options["ports"] = {f"{setup.port}/tcp": (LOOPBACK, None)}
    else:
        socket = f"{SHARED_FOLDER}/{SOCKET}"
        proxy = ["python3", "-I", "-S", "-c", SOCKET_PROXY.read_text(), socket, str(setup.port)]
        command = proxy + command
        options["network_mode"] = "none"
        options["mounts"] = [Mount(SHARED_FOLDER, str(shared), type="bind")]
    return options | {"entrypoint": command[:1], "command": command[1:]}


def cause_of_death(state: Mapping[str, Any], mem_limit_mb: int) -> str:
    """Describe why a container ended, from its `State` as Docker reports it."""
    cause = f"exit code {state['ExitCode']}"
    if state.get("OOMKilled"):
        cause += f", out of memory: host.mem_limit_mb={mem_limit_mb}"
    return cause
