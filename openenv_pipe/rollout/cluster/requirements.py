"""What a run with `cluster=ray` requires of its configuration and of this machine."""

from openenv_pipe.config.schema import ProcessHostConfig, RayClusterConfig, RunConfig
from openenv_pipe.config.schema.agent import CallingAgentConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.ray_cluster import require_ray


def check_settings_of_cluster(config: RunConfig) -> str:
    """Check what can be checked without joining the cluster; return what `check` reports.

    Raises ConfigError.
    """
    cluster, host = config.cluster, config.host
    if not isinstance(cluster, RayClusterConfig):
        return ""
    if isinstance(config.agent, CallingAgentConfig):
        raise ConfigError(
            f"cluster=ray with agent={config.agent.type}: rollout workers play by the pipeline's "
            "own loop; set agent=loop or cluster=local"
        )
    if host.type not in ("process", "python"):
        raise ConfigError(
            f"cluster=ray with host={host.type}: each rollout worker starts environment servers "
            "as processes on its node; set host=process, or cluster=local"
        )
    if isinstance(host, ProcessHostConfig) and host.port is not None:
        raise ConfigError(
            f"cluster=ray with host.port={host.port}: several rollout workers may be on one node; "
            "set host.port=null"
        )
    require_ray()
    return f"{cluster.rollout_workers} rollout workers, by Ray at {cluster.address}"
