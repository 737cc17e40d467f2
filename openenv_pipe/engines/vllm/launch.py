"""Ways to have a server: a process of ours, or one that runs already; a container is in
`launch_docker.py`. After `start` all are the same: a URL that will answer, or a death.
"""

import asyncio
import tempfile
import time
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
from openenv_pipe.system.process import KILL_MARGIN_S, ManagedProcess, free_port, port_in_use

OWN_ADDRESS = "127.0.0.1"  # where our servers listen
MODULE = "vllm.entrypoints.openai.api_server"
POLL_S = 0.05
OUTAGE_POLL_S = 1.0
LONGEST_SOCKET_FOLDER = 103 - len("/123e4567-e89b-12d3-a456-426614174000")  # bytes; of macOS
OUTAGES_OF_A_DEATH = 3  # looks in a row that an attached server does not answer


class VllmServer(Protocol):
    """One server, which may be started again after its death."""

    url: str
    log: Path | None  # None: elsewhere

    async def start(self) -> None:
        """Begins a start; the server answers later. Raises EngineError or ConfigError."""

    async def died(self) -> str:
        """Returns when it is gone, with the cause."""

    async def stop(self) -> None:
        """Ends it, if it is ours. May be called again."""


class VllmProcess:
    """A process under a guardian: when we die, however, all processes of the server do."""

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
        return await end_of(self._process)

    async def stop(self) -> None:
        if self._process is not None:
            await stop_quietly(self._process, self._config.stop_timeout_s)


class AttachedVllmServer:
    """Started and ended by somebody else; it must see our folder of weights, or the same one."""

    log: Path | None = None

    def __init__(self, url: str, config: VllmEngineConfig) -> None:
        self.url = url.rstrip("/")
        self._config = config
        self._has_answered = False

    async def start(self) -> None:
        """Its start is not ours: `ServerLife` waits for its first answer."""
        self._has_answered = False

    async def died(self) -> str:
        num_silent = 0
        async with VllmClient(
            self.url, api_key=self._config.api_key, request_timeout_s=1
        ) as client:
            while num_silent < OUTAGES_OF_A_DEATH:
                await asyncio.sleep(OUTAGE_POLL_S)
                healthy = await client.is_healthy(5.0)
                self._has_answered |= healthy
                num_silent = num_silent + 1 if self._has_answered and not healthy else 0
        return "it does not answer"

    async def stop(self) -> None:
        """It is not ours to stop."""


def server_process(
    python: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> ManagedProcess:
    """vLLM's server under a guardian. Its sockets, which it leaves behind, go with it."""
    sockets = Path(tempfile.mkdtemp(prefix="vllm-"))
    fits = len(str(sockets)) <= LONGEST_SOCKET_FOLDER
    place = {"VLLM_RPC_BASE_PATH": str(sockets)} if fits else {}
    try:
        return ManagedProcess(
            [str(python), "-m", MODULE, *arguments],
            log=log,
            environment={**place, **environment},
            grace_s=0.5,  # should we die: nothing of the server is worth waiting for
            scratch=sockets,
        )
    except OSError:
        sockets.rmdir()
        raise


def pick_port(config: VllmEngineConfig, number: int) -> int:
    """For the server of that number. Raises ConfigError."""
    if config.port is None:
        return free_port(OWN_ADDRESS)
    port = config.port + number
    if port_in_use(port, OWN_ADDRESS):
        beyond = f", and {port} of server {number}," if number else ""
        raise ConfigError(
            f"engine.port={config.port}{beyond} is used by another program; null picks a free one"
        )
    return port


async def end_of(process: ManagedProcess) -> str:
    while process.alive:
        await asyncio.sleep(POLL_S)
    return f"exit code {process.returncode}"


async def stop_quietly(process: ManagedProcess, timeout_s: float) -> None:
    """Blocks no event loop while the tree ends."""
    process.begin_stop(timeout_s)
    deadline = time.monotonic() + timeout_s + KILL_MARGIN_S
    while process.alive and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    await asyncio.to_thread(process.stop, 0.0)
