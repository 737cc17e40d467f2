"""Host `docker`: servers in containers of one image, with limits, and by default without a network.

With `network: none-outbound` a container has only a loopback interface, and its server is reached
through a unix socket (`socket_proxy.py`). A network of Docker's type `internal` is no replacement:
Docker publishes no ports of it, and its containers reach every service of this machine by its
bridge. The socket needs `python3` in the image, and a daemon that shares this machine's kernel,
which Docker Desktop does not. There, use `network: bridge`: Docker publishes the port on 127.0.0.1,
under a number that it picks, and the container can connect to the outside. On two cores one session
took 3,500 steps a second through the socket, and 2,500 through a published port.

No container outlives the run: a guard process removes them (`guard.py`).
"""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import docker
from pydantic import JsonValue

from openenv_pipe.environments.hosts.docker.container import ContainerSetup, EnvContainer
from openenv_pipe.environments.hosts.docker.daemon import (
    LOGS,
    OWNER,
    DaemonErrors,
    connect,
    in_thread,
    refusal,
    remove_orphans,
)
from openenv_pipe.environments.hosts.docker.image import Image, ensure_image, image_recipe
from openenv_pipe.environments.hosts.docker.start_guard import (
    GUARD_LIMIT_S,
    start_guard,
    wait_for_guard,
)
from openenv_pipe.environments.hosts.package import manifest
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.process_id import ProcessId
from openenv_pipe.system.resources import find_env
from openenv_pipe.system.supervisor import RestartBudget

if TYPE_CHECKING:
    from openenv_pipe.config.schema import DockerHostConfig, EnvConfig

LOG = "docker.log"  # of builds, and of the guard


class DockerHost(SupervisedHost):
    """A host with `config.num_servers` containers; logs are `log_dir`/env-0.log, docker.log, ..."""

    def __init__(self, env: "EnvConfig", config: "DockerHostConfig", log_dir: Path) -> None:
        """Prepare the host without starting it. Raises ConfigError if it could not be started."""
        if config.network == "none-outbound" and sys.platform != "linux":
            raise ConfigError(
                "host.network=none-outbound reaches containers through sockets, which Docker "
                "shares on Linux only; set host.network=bridge, which allows the environment "
                "outgoing connections"
            )
        self._config = config
        self._log_dir = log_dir
        self._port = declared_port(env, config)
        self._recipe = image_recipe(env, config)
        self._containers = [
            EnvContainer(env, config, index, log_dir / f"env-{index}.log")
            for index in range(config.num_servers)
        ]
        self._client: docker.DockerClient | None = None
        self._image: Image | None = None
        self._folder: Path | None = None
        self._guard: ManagedProcess | None = None
        super().__init__(
            env,
            self._containers,
            sessions_per_server=config.sessions_per_server,
            restart=RestartBudget(config.max_restarts, "host.max_restarts").restart,
        )

    def facts(self) -> dict[str, JsonValue]:
        assert self._image is not None
        return {"image": {"name": self._image.name, "id": self._image.id}}

    async def start(self) -> None:
        """See `Host.start`. Removes containers of dead runs, and builds a missing image."""
        try:
            await self._prepare()
        except BaseException as error:
            await self.close()
            if isinstance(error, DaemonErrors):
                raise refusal(error) from error
            raise
        await super().start()

    async def _prepare(self) -> None:
        self._client = await in_thread(connect)
        await in_thread(remove_orphans, self._client)
        owner = ProcessId.of_this_process().model_dump_json()
        self._folder = Path(tempfile.mkdtemp(prefix="openenv-pipe-"))  # only this user can open it
        self._guard = start_guard(owner, self._folder, self._log_dir / LOG)
        self._image = await ensure_image(
            self._client, self._recipe, self._log_dir / LOG, self._config.build_timeout_s
        )
        await wait_for_guard(self._guard, self._folder)
        setup = ContainerSetup(
            client=self._client,
            image=self._image,
            port=self._port or exposed_port(self._image),
            folder=self._folder,
            labels={OWNER: owner, LOGS: str(self._log_dir.absolute())},
        )
        for container in self._containers:
            container.setup = setup

    async def _close(self) -> None:
        try:
            await super()._close()
        finally:
            await asyncio.to_thread(self._release)

    def _release(self) -> None:
        if self._guard is not None:
            self._guard.stop(GUARD_LIMIT_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._client is not None:
            self._client.close()


def declared_port(env: "EnvConfig", config: "DockerHostConfig") -> int | None:
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
    """Return the only port that the image exposes. Raises ConfigError if there is not one."""
    if len(image.ports) != 1:
        exposed = ", ".join(map(str, image.ports)) or "no port"
        raise ConfigError(
            f"image {image.name} exposes {exposed}, and no openenv.yaml names the server's port; "
            "set host.container_port, which is 8000 in most of OpenEnv's images"
        )
    return image.ports[0]
