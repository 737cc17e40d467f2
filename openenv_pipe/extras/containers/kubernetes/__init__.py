"""Host `kubernetes`: environment servers in pods."""

from pathlib import Path
from typing import TYPE_CHECKING

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.optional_packages import how_to_install

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig
    from openenv_pipe.environments.hosts.base import Host
    from openenv_pipe.extras.containers.schema import KubernetesHostConfig


def build_kubernetes_host(env: "EnvConfig", config: "KubernetesHostConfig", logs: Path) -> "Host":
    """Build the host. Raises ConfigError if its package is missing or `pod_spec` is rejected."""
    try:
        from openenv_pipe.extras.containers.kubernetes.host import KubernetesHost
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"host=kubernetes needs the package kubernetes ({error}); "
            f"{how_to_install('kubernetes')}"
        ) from error
    return KubernetesHost(env, config, logs)
