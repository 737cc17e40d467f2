"""Build the host of an environment's servers from its configuration."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_pipe.environments.hosts.package import check_variables
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.resources import find_env, short_path

if TYPE_CHECKING:
    from openenv_pipe.config.schema import RunConfig, ServingConfig
    from openenv_pipe.environments.hosts.base import Host


def check_host(config: "RunConfig") -> str:
    """Check that the host can be built, and describe its servers in a line.

    The `check` of a host's type is called with the configurations of the environment and of the
    host. For a type without `check`, `build` is called instead. Raises ConfigError.
    """
    env, host = config.env, config.host
    if check := block_types("host")[host.type].check:
        check_variables(env)
        return str(load(check)(env, host))
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as logs:
        build_host(config, Path(logs))
    if host.servers:
        return ", ".join(f"host.{key}={value}" for key, value in host.servers.items())
    return short_path(find_env(env.package)) if env.package else f"host.type={host.type}"


def build_host(config: "RunConfig | ServingConfig", logs: Path) -> "Host":
    """Build the host of type `config.host.type`. It starts no server before `Host.start`.

    The `build` of a host's type is called with the configurations of the environment and of the
    host, and with `logs`.

    Args:
        logs: the folder that the servers' log files go into.

    Raises:
        ConfigError: the environment cannot be run by this host.
    """
    check_variables(config.env)
    host: Host = load(block_types("host")[config.host.type].build)(config.env, config.host, logs)
    return host
