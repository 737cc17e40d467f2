"""Host `kubernetes`: environment servers in pods."""

from pathlib import Path

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.extras.containers.schema import KubernetesHostConfig
from openenv_pipe.system.optional_packages import needed_by


def build_kubernetes_host(env: EnvConfig, config: KubernetesHostConfig, logs: Path) -> Host:
    """Build the host. Raises ConfigError if its package is missing or `pod_spec` is rejected."""
    with needed_by("host=kubernetes", "kubernetes"):
        from openenv_pipe.extras.containers.kubernetes.host import KubernetesHost
    return KubernetesHost(env, config, logs)
