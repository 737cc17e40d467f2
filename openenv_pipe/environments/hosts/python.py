"""The host of `type: python`: a class or a function of the user, or of a plugin."""

from pathlib import Path
from typing import TYPE_CHECKING

from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.system.copies import copied
from openenv_pipe.system.python_targets import build_part, check_part
from openenv_pipe.system.user_code import guarded

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig, PythonHostConfig


def check_python_host(env: "EnvConfig", config: "PythonHostConfig") -> str:
    """Import the target without calling it. Raises ConfigError if it makes no host."""
    check_part("host", config, Host, 3)
    return f"by {config.target}"


def build_python_host(env: "EnvConfig", config: "PythonHostConfig", logs: Path) -> Host:
    """Call the target. Raises ConfigError if it makes no host."""
    arguments = copied((env, logs, config.sessions_per_server))
    return guarded(build_part("host", config, Host, *arguments), f"host.target={config.target!r}")
