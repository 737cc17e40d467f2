"""Server providers: a run starts its own servers, or uses those that a sweep's worker keeps.

The caller that starts a run creates its provider. `assembled` gets the environment's host from it,
and the vLLM engine its server processes.
"""

from pathlib import Path
from typing import Protocol

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.servers import ManagedLaunch, own_processes
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.early import EarlyHost


class ServerProvider(Protocol):
    """Makes the servers of a run, which start with their own `start`."""

    def host(self, config: RunConfig, logs: Path) -> Host:
        """Make the host of the environment servers. Raises ConfigError."""

    async def vllm_processes(self, launch: ManagedLaunch) -> list[VllmServer]:
        """Make the vLLM servers of `engine.launch=managed`. Raises ConfigError."""


class OwnServers:
    """Servers that the run starts, and that end with it."""

    def __init__(self, early: EarlyHost | None = None) -> None:
        """early: the environment's host, if its servers have begun to start."""
        self._early = early

    def host(self, config: RunConfig, logs: Path) -> Host:
        host = self._early.take(logs) if self._early else None
        return host or build_host(config, logs)

    async def vllm_processes(self, launch: ManagedLaunch) -> list[VllmServer]:
        return await own_processes(launch)
