"""Build the host of an environment's servers from its configuration."""

from pathlib import Path
from typing import TYPE_CHECKING

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.copies import copied
from openenv_pipe.system.extras import how_to_install
from openenv_pipe.system.python_targets import build_part
from openenv_pipe.system.user_code import guarded

if TYPE_CHECKING:
    from openenv_pipe.config.schema import RunConfig, ServingConfig
    from openenv_pipe.environments.hosts.base import Host


def build_host(config: "RunConfig | ServingConfig", logs: Path) -> "Host":
    """Build the host of type `config.host.type`. It starts no server before `Host.start`.

    Each host is imported only where it is used, because some load a large SDK.

    Args:
        logs: the folder that the servers' log files go into.

    Raises:
        ConfigError: the environment cannot be run by this host.
    """
    match config.host.type:
        case "docker":
            from openenv_pipe.extras.containers.docker.host import DockerHost

            return DockerHost(config.env, config.host, logs)
        case "attach":
            from openenv_pipe.environments.hosts.attach import AttachHost

            return AttachHost(config.env, config.host)
        case "kubernetes":
            try:
                from openenv_pipe.extras.containers.kubernetes.host import KubernetesHost
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"host=kubernetes needs the package kubernetes ({error}); "
                    f"{how_to_install('kubernetes')}"
                ) from error
            return KubernetesHost(config.env, config.host, logs)
        case "python":
            from openenv_pipe.environments.hosts.base import Host

            arguments = (config.env, logs, config.host.sessions_per_server)
            name = f"host.target={config.host.target!r}"
            return guarded(build_part("host", config.host, Host, *copied(arguments)), name)
        case "none":
            from openenv_pipe.environments.hosts.none import NoHost

            return NoHost(config.host.sessions_per_server)
        case "process":
            from openenv_pipe.environments.hosts.process import ProcessHost

            return ProcessHost(config.env, config.host, logs)
