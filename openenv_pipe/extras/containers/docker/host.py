"""Host `docker`: servers in containers of one image, with limits, and by default without a network.

With `network: none-outbound` a container has only a loopback interface, and its server is reached
through a unix socket (`socket_proxy.py`). A network of Docker's type `internal` is no replacement:
Docker publishes no ports of it, and its containers reach every service of this machine by its
bridge. The socket needs `python3` in the image, and a daemon that shares this machine's kernel.
Docker Desktop's does not; with it, use `network: bridge`: Docker publishes the port on 127.0.0.1,
under a number that it picks, and the container can connect to the outside. On two cores one session
took 3,500 steps a second through the socket, and 2,500 through a published port.

No container outlives the run: a guard process removes them (`guard.py`).
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from docker.types import DeviceRequest, Mount
from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.hosts.package import manifest
from openenv_pipe.environments.hosts.process import filled_in, server_variables
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import ConfigError, FailureError, HostError
from openenv_pipe.extras.containers.docker.daemon import DaemonErrors, explained
from openenv_pipe.extras.containers.docker.guarded import GuardedDaemon
from openenv_pipe.extras.containers.docker.image import Image, image_recipe
from openenv_pipe.extras.containers.docker.running import (
    SHARED_FOLDER,
    RunningContainer,
    behind_proxy,
    cause_of_death,
    entry,
    restrictions,
)
from openenv_pipe.extras.containers.schema import DockerHostConfig
from openenv_pipe.system.readiness import unless_dead, wait_until_healthy
from openenv_pipe.system.resources import find_env
from openenv_pipe.system.supervisor import RestartBudget

SOCKET = "server"  # the socket's name in the folder that container and host share
LOOPBACK = "127.0.0.1"


class EnvContainer:
    def __init__(
        self, env: EnvConfig, config: DockerHostConfig, daemon: GuardedDaemon, index: int, log: Path
    ) -> None:
        """daemon: is opened before `start`, when `port` is also set."""
        self.log = log
        self.url = ""
        self.port = 0  # of the server in the container
        self._env = env
        self._config = config
        self._daemon = daemon
        self._index = index
        self._running: RunningContainer | None = None

    async def start(self) -> None:
        try:
            await self._launch()
            self.url = await self._find_url()
            healthy = wait_until_healthy(
                self.url, timeout_s=self._config.start_timeout_s, key="host.start_timeout_s"
            )
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
        running = self._running
        assert running is not None
        await running.ended.wait()
        limit = f"host.mem_limit_mb={self._config.mem_limit_mb}"
        return running.failure or cause_of_death(running.state, limit)

    async def stop(self) -> None:
        if self._running is not None:
            await self._running.remove(self._config.stop_timeout_s)

    async def _launch(self) -> None:
        shared = self._daemon.folder / str(self._index)
        shared.mkdir(exist_ok=True)
        shared.chmod(0o777)  # for the image's user; only this user can open the parent folder
        (shared / SOCKET).unlink(missing_ok=True)
        options = container_options(self._env, self._config, self._daemon, self.port, shared)
        self._running = RunningContainer(self._daemon.client, self.log, str(self._index))
        await self._running.start(options)

    async def _find_url(self) -> str:
        assert self._running is not None
        if self._config.network == "none-outbound":
            return f"unix://{self._daemon.folder / str(self._index) / SOCKET}"
        network = (await self._running.attributes())["NetworkSettings"]
        ports = network["Ports"].get(f"{self.port}/tcp")
        if not ports:  # a container that has ended has no ports
            cause = await asyncio.wait_for(self.died(), self._config.start_timeout_s)
            raise HostError(f"the server died before it was ready: {cause}")
        return f"http://{LOOPBACK}:{ports[0]['HostPort']}"


def container_options(
    env: EnvConfig, config: DockerHostConfig, daemon: GuardedDaemon, port: int, shared: Path
) -> dict[str, Any]:
    """Return the keyword arguments of `containers.create` except `name`.

    port: of the server in the container.
    shared: the folder for the socket of a container without a network. Raises ConfigError.
    """
    image = daemon.image
    values = {"{port}": str(port), "{host}": "0.0.0.0"}
    command = [filled_in(part, values) for part in env.command or image.start]
    if not command:
        raise ConfigError(f"image {image.name} has neither ENTRYPOINT nor CMD; set env.command")
    options: dict[str, Any] = {
        **restrictions(config),
        "image": image.id,
        "environment": server_variables(env, config.sessions_per_server),
        "labels": dict(daemon.labels),
        "tmpfs": {"/tmp": f"size={config.tmp_mb}m,mode=1777"},
    }
    if config.gpus:
        which = {"count": -1} if config.gpus == "all" else {"device_ids": list(config.gpus)}
        options["device_requests"] = [DeviceRequest(capabilities=[["gpu"]], **which)]
    if config.network == "bridge":
        options["ports"] = {f"{port}/tcp": (LOOPBACK, None)}
    else:
        command = behind_proxy(f"{SHARED_FOLDER}/{SOCKET}", str(port), command)
        options["network_mode"] = "none"
        options["mounts"] = [Mount(SHARED_FOLDER, str(shared), type="bind")]
    return options | entry(command)


class DockerHost(SupervisedHost):
    """A host with `config.num_servers` containers; logs are `log_dir`/env-0.log, docker.log, ..."""

    def __init__(self, env: EnvConfig, config: DockerHostConfig, log_dir: Path) -> None:
        if config.network == "none-outbound" and sys.platform != "linux":
            raise ConfigError(
                "host.network=none-outbound reaches containers through sockets, which Docker "
                "shares on Linux only; set host.network=bridge, which allows the environment "
                "outgoing connections"
            )
        self._config = config
        self._port = declared_port(env, config)
        self._recipe = image_recipe(env, config)
        self._daemon = GuardedDaemon(log_dir)
        self._containers = [
            EnvContainer(env, config, self._daemon, index, log_dir / f"env-{index}.log")
            for index in range(config.num_servers)
        ]
        super().__init__(
            env,
            self._containers,
            sessions_per_server=config.sessions_per_server,
            restart=RestartBudget(config.max_restarts, "host.max_restarts").restart,
        )

    def facts(self) -> dict[str, JsonValue]:
        image = self._daemon.image
        return {"image": {"name": image.name, "id": image.id}}

    async def _prepare(self) -> None:
        """Remove containers of dead runs, and build a missing image."""
        await self._daemon.open(self._recipe, self._config.build_timeout_s)
        port = self._port or exposed_port(self._daemon.image)
        for container in self._containers:
            container.port = port

    async def _close(self) -> None:
        try:
            await super()._close()
        finally:
            await self._daemon.close()


def declared_port(env: EnvConfig, config: DockerHostConfig) -> int | None:
    """Return the server's port in the container, as the configuration or openenv.yaml names it.

    None if neither does. Raises ConfigError.
    """
    if config.container_port is not None or env.package is None:
        return config.container_port
    package = find_env(env.package)
    port = manifest(package).get("port")
    if port is not None and (type(port) is not int or not 1 <= port <= 65535):
        raise ConfigError(
            f"{package / 'openenv.yaml'}: port is {port!r}, expected a number such as 8000; "
            "or set host.container_port"
        )
    return port


def exposed_port(image: Image) -> int:
    """Return the only port that the image exposes. Raises ConfigError unless there is one."""
    if len(image.ports) != 1:
        exposed = ", ".join(map(str, image.ports)) or "no port"
        raise ConfigError(
            f"image {image.name} exposes {exposed}, and no openenv.yaml names the server's port; "
            "set host.container_port, which is 8000 in most of OpenEnv's images"
        )
    return image.ports[0]
