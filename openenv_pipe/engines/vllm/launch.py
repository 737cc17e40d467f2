"""Two kinds of vLLM servers: a process that we start, and one that somebody else has started.

`launch_docker.py` has containers and `shared_server.py` leased servers.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.install import INSIDE
from openenv_pipe.engines.vllm.server_command import (
    ServerSpec,
    process_environment,
    server_arguments,
    server_variables,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.process import ManagedProcess, free_port, port_in_use
from openenv_pipe.system.readiness import ATTEMPT_LIMIT_S, wait_for_outage, wait_until_healthy
from openenv_pipe.system.supervisor import RestartableServer

OWN_ADDRESS = "127.0.0.1"  # where our servers listen
MODULE = "vllm.entrypoints.openai.api_server"
LONGEST_SOCKET_FOLDER = 103 - len("/123e4567-e89b-12d3-a456-426614174000")  # bytes; of macOS


class VllmServer(RestartableServer, Protocol):
    """One vLLM server, without a policy. `supervisor.py` waits for its first token."""

    async def start(self) -> None:
        """Begin the start and return: the server answers, or dies, later.

        Raises:
            EngineError, ConfigError: the start cannot even begin.
        """
        ...


class VllmProcess:
    """A process on this machine. It ends, with all of its children, when this process does."""

    def __init__(self, spec: ServerSpec, config: VllmEngineConfig, python: Path, log: Path) -> None:
        self.url = ""
        self.log: Path | None = log
        self._spec = spec
        self._config = config
        self._python = python
        self._process: ManagedProcess | None = None

    async def start(self) -> None:
        port = pick_port(self._config, self._spec.number)
        self.url = f"http://{OWN_ADDRESS}:{port}"
        variables = server_variables(self._spec, self._config, str(INSIDE))
        arguments = server_arguments(self._spec, self._config, OWN_ADDRESS, port)
        environment = process_environment(self._spec.model, variables)
        assert self.log is not None
        self._process = server_process(self._python, arguments, environment, self.log)

    async def died(self) -> str:
        assert self._process is not None
        return await self._process.exited()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stopped(self._config.stop_timeout_s)


class AttachedVllmServer:
    """A server that others start and stop. It must see our weights folder under the same path."""

    log: Path | None = None

    def __init__(self, url: str, config: VllmEngineConfig) -> None:
        self.url = url.rstrip("/")
        self._config = config
        self._has_answered = False

    async def start(self) -> None:
        """Start nothing: `VllmSupervisor` waits for the first answer."""
        self._has_answered = False

    async def died(self) -> str:
        """See `wait_for_outage`. A server that has not answered yet counts as starting."""
        async with VllmClient(
            self.url, api_key=self._config.api_key, request_timeout_s=1
        ) as client:
            if not self._has_answered:
                await wait_until_healthy(self.url, timeout_s=math.inf, check=client.check_health)
                self._has_answered = True
            return await wait_for_outage(lambda: client.check_health(ATTEMPT_LIMIT_S))

    async def stop(self) -> None:
        """Leave the server running."""


def server_process(
    python: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> ManagedProcess:
    """Start vLLM's API server. It leaves sockets behind, so their folder is removed at its end."""
    sockets = Path(tempfile.mkdtemp(prefix="vllm-"))
    fits = len(str(sockets)) <= LONGEST_SOCKET_FOLDER
    variables = {"VLLM_RPC_BASE_PATH": str(sockets)} if fits else {}
    try:
        return ManagedProcess(
            [str(python), "-m", MODULE, *arguments],
            log=log,
            environment={**variables, **environment},
            grace_s=0.5,  # if we die: the server has nothing to save
            scratch=sockets,
        )
    except OSError:
        sockets.rmdir()
        raise


def pick_port(config: VllmEngineConfig, number: int) -> int:
    """Return the port of the server with that number. Raises ConfigError if it is taken."""
    if config.port is None:
        return free_port(OWN_ADDRESS)
    port = config.port + number
    if port_in_use(port, OWN_ADDRESS):
        beyond = f", and {port} of server {number}," if number else ""
        raise ConfigError(
            f"engine.port={config.port}{beyond} is used by another program; null picks a free one"
        )
    return port
