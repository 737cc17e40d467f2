"""Two kinds of vLLM servers: a process that the run starts, and a server that is running already.

Servers on other machines and in containers are in extras.
"""

import asyncio
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.client import Files, VllmClient
from openenv_pipe.engines.vllm.installed import python_path
from openenv_pipe.engines.vllm.server_command import (
    KEY_VARIABLE,
    VARIABLES,
    ServerSpec,
    process_environment,
    server_arguments,
    server_variables,
)
from openenv_pipe.errors import ConfigError, EngineError, last_lines
from openenv_pipe.registry import if_command
from openenv_pipe.system.child_environment import names_left_out
from openenv_pipe.system.process import ManagedProcess, free_port, port_in_use
from openenv_pipe.system.readiness import ATTEMPT_LIMIT_S, wait_for_outage, wait_until_healthy
from openenv_pipe.system.secrets import new_key
from openenv_pipe.system.supervisor import RestartableServer

OWN_ADDRESS = "127.0.0.1"  # servers that the run starts listen here
FIND_LIMIT_S = 5.0  # for an attached server's first answer
FIND_POLL_S = 0.2
MODULE = "vllm.entrypoints.openai.api_server"
Clear = Callable[[str, str], Awaitable[bool]]  # of a server's URL and key
# In bytes: macOS limits the path of a socket to 103, and vLLM names sockets by UUIDs.
LONGEST_SOCKET_FOLDER = 103 - len("/123e4567-e89b-12d3-a456-426614174000")


class VllmServer(RestartableServer, Protocol):
    """One vLLM server, without a policy. `replica.py` waits until it generates a token."""

    @property
    def key(self) -> str | None:
        """The key that every request needs; None: an attached server without one."""

    @property
    def files(self) -> Files | None:
        """What brings files to a server on another machine; None: it reads those of this one."""

    @property
    def left_out(self) -> str:
        """Names the variables that the server's process did not get; empty if there is none."""

    @property
    def about(self) -> dict[str, Any]:
        """Facts for the run's record, complete after `start`. Empty: there is nothing to say."""

    async def start(self) -> None:
        """Begin to start the server, and return before it answers.

        Raises EngineError, ConfigError: the server cannot be started.
        """


class VllmProcess:
    """A server process on this machine. It and its children end when this process ends.

    With `clear`, the process keeps running after `stop` if it could be cleared, for the next
    `start`.
    """

    files: Files | None = None

    def __init__(
        self,
        spec: ServerSpec,
        config: VllmEngineConfig,
        python: Path,
        log: Path,
        *,
        address: str = OWN_ADDRESS,
        key: str | None = None,
        clear: Clear | None = None,
    ) -> None:
        """Prepare a server without starting it.

        address: where it listens.
        key: None: a new one.
        clear: see `kept_vllm.cleared`; None: `stop` always ends the process.
        """
        self.spec = spec
        self.about: dict[str, Any] = {}
        self.url = ""
        self._environment: dict[str, str] = {}
        self.key = key or new_key("a vLLM server")
        self._address = address
        self.log = log
        self._config = config
        self._python = python
        self._clear = clear
        self._process: ManagedProcess | None = None

    @property
    def left_out(self) -> str:
        return names_left_out(self._environment, last_lines(self.log), VARIABLES)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    async def start(self) -> None:
        if self.alive:
            return
        address = self._address
        port = pick_port(self._config, self.spec.number, address)
        self.url = f"http://{address}:{port}"
        inside = python_path(self.spec.sees_images)
        variables = server_variables(self.spec, self._config, inside)
        arguments = server_arguments(self.spec, self._config, address, port)
        environment = process_environment(self.spec.model, {**variables, KEY_VARIABLE: self.key})
        self._environment = environment
        self._process = server_process(self._python, arguments, environment, self.log)

    async def died(self) -> str:
        assert self._process is not None
        return await self._process.exited()

    async def stop(self) -> None:
        is_kept = self.alive and self._clear is not None and await self._clear(self.url, self.key)
        if not is_kept:
            await self.end()

    async def end(self) -> None:
        """Stop the process even if it could be kept."""
        if self._process is not None:
            await self._process.stopped(self._config.stop_timeout_s)


class AttachedVllmServer:
    """A server that others start and stop. It must see the weights folder under the same path."""

    log: Path | None = None
    files: Files | None = None
    left_out = ""

    def __init__(self, url: str, config: VllmEngineConfig) -> None:
        self.url = url.rstrip("/")
        self.about: dict[str, Any] = {}
        self.key = config.api_key
        self._has_answered = False
        self._was_found = False

    async def start(self) -> None:
        """Start nothing: `Replica` waits for the first answer.

        Raises EngineError: at the first call, if no vLLM server is at the URL. Later, a server that
        is gone may take its time to come back.
        """
        self._has_answered = False
        if not self._was_found:
            await self._find()
            self._was_found = True

    async def _find(self) -> None:
        """Return when something answers at the URL, even if it is not healthy yet."""
        deadline = time.monotonic() + FIND_LIMIT_S
        while (problem := await self._problem()) is not None:
            if time.monotonic() > deadline:
                command = "`openenv-pipe engine command` with the arguments of `train`"
                how = if_command("engine", f"{command} prints how to start it; ")
                raise EngineError(
                    f"engine.url: {self.url} is not a running vLLM server: {problem}; {how}wait "
                    "until it answers, or set engine.launch=managed"
                )
            await asyncio.sleep(FIND_POLL_S)

    async def _problem(self) -> str | None:
        """Return why this cannot be a vLLM server; None if it can."""
        async with VllmClient(self.url, api_key=self.key, request_timeout_s=1) as client:
            try:
                status = await client.health_status(ATTEMPT_LIMIT_S)
            except ServerGoneError as error:
                return str(error)
        if status in (401, 403):
            return (
                f"it answers /health with status {status}: set engine.api_key to its key, "
                "preferably as ${oc.env:VLLM_API_KEY}"
            )
        return "it answers /health with status 404" if status == 404 else None

    async def died(self) -> str:
        """See `wait_for_outage`. A server that has not answered yet counts as starting."""
        async with VllmClient(self.url, api_key=self.key, request_timeout_s=1) as client:
            if not self._has_answered:
                await wait_until_healthy(self.url, timeout_s=math.inf, check=client.check_health)
                self._has_answered = True
            return await wait_for_outage(lambda: client.check_health(ATTEMPT_LIMIT_S))

    async def stop(self) -> None:
        """Leave the server running."""


def server_process(
    python: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> ManagedProcess:
    """Start vLLM's API server, and remove its sockets and temporary files when it ends."""
    temporary = Path(tempfile.mkdtemp(prefix="vllm-"))
    fits = len(str(temporary)) <= LONGEST_SOCKET_FOLDER
    variables = {"VLLM_RPC_BASE_PATH": str(temporary)} if fits else {}
    try:
        return ManagedProcess(
            [str(python), "-m", MODULE, *arguments],
            log=log,
            environment={**variables, **environment, "TMPDIR": str(temporary)},
            grace_s=0.5,  # the server has nothing to save if this process dies
            scratch=temporary,
            own_session=False,  # its processes poll for each other's messages
        )
    except OSError:
        temporary.rmdir()
        raise


def pick_port(config: VllmEngineConfig, number: int, address: str = OWN_ADDRESS) -> int:
    """Return the port of the server with that number. Raises ConfigError if it is taken."""
    if config.port is None:
        return free_port(address)
    port = config.port + number
    if port_in_use(port, address):
        raise ConfigError(
            f"engine.port={config.port}: port {port}, of server {number}, is used by another "
            "program; set another port, or null for a free one"
        )
    return port
