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

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from openenv_pipe.environments.hosts.package import manifest
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.containers.docker.container import ContainerSetup, EnvContainer
from openenv_pipe.extras.containers.docker.guarded import GuardedDaemon
from openenv_pipe.extras.containers.docker.image import Image, image_recipe
from openenv_pipe.system.resources import find_env
from openenv_pipe.system.supervisor import RestartBudget

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig
    from openenv_pipe.extras.containers.schema import DockerHostConfig


class DockerHost(SupervisedHost):
    """A host with `config.num_servers` containers; logs are `log_dir`/env-0.log, docker.log, ..."""

    def __init__(self, env: "EnvConfig", config: "DockerHostConfig", log_dir: Path) -> None:
        if config.network == "none-outbound" and sys.platform != "linux":
            raise ConfigError(
                "host.network=none-outbound reaches containers through sockets, which Docker "
                "shares on Linux only; set host.network=bridge, which allows the environment "
                "outgoing connections"
            )
        self._config = config
        self._port = declared_port(env, config)
        self._recipe = image_recipe(env, config)
        self._containers = [
            EnvContainer(env, config, index, log_dir / f"env-{index}.log")
            for index in range(config.num_servers)
        ]
        self._daemon = GuardedDaemon(log_dir)
        super().__init__(
            env,
            self._containers,
            sessions_per_server=config.sessions_per_server,
            restart=RestartBudget(config.max_restarts, "host.max_restarts").restart,
        )

    def facts(self) -> dict[str, JsonValue]:
        image = self._daemon.image
        return {"image": {"name": image.name, "id": image.id}}

    async def start(self) -> None:
        """See `Host.start`. Removes containers of dead runs, and builds a missing image."""
        try:
            await self._daemon.open(self._recipe, self._config.build_timeout_s)
            port = self._port or exposed_port(self._daemon.image)
        except BaseException:
            await self.close()
            raise
        for container in self._containers:
            container.setup = ContainerSetup(daemon=self._daemon, port=port)
        await super().start()

    async def _close(self) -> None:
        try:
            await super()._close()
        finally:
            await self._daemon.close()


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
