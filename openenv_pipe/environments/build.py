"""Chooses the host of an environment's servers."""

from pathlib import Path
from typing import TYPE_CHECKING

from openenv_pipe.errors import ConfigError

if TYPE_CHECKING:
    from openenv_pipe.config.schema import RunConfig, ServingConfig
    from openenv_pipe.environments.hosts.base import Host


def build_host(
    config: "RunConfig | ServingConfig", logs: Path, keeper: Path | None = None
) -> "Host":
    """The host of `config.host.type`, which starts nothing yet. Logs go into the folder `logs`.

    keeper: the socket of a process that keeps servers for several runs; it is asked for them
    instead, unless they run already.
    Raises ConfigError if the environment cannot be run this way.
    """
    if keeper is not None and config.host.type != "attach":
        from openenv_pipe.environments.hosts.shared import KeptHost

        return KeptHost(config.env, config.host, keeper)
    if config.host.type == "docker":
        from openenv_pipe.environments.hosts.docker.host import (
            DockerHost,  # its SDK is loaded where it is used
        )

        return DockerHost(config.env, config.host, logs)
    if config.host.type == "attach":
        from openenv_pipe.environments.hosts.attach import AttachHost

        return AttachHost(config.env, config.host)
    if config.host.type == "kubernetes":
        try:
            from openenv_pipe.environments.hosts.kubernetes.host import KubernetesHost
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"host=kubernetes needs the package kubernetes ({error}); "
                "pip install 'openenv-pipe[kubernetes]'"
            ) from error
        return KubernetesHost(config.env, config.host, logs)
    from openenv_pipe.environments.hosts.process import ProcessHost

    return ProcessHost(config.env, config.host, logs)
