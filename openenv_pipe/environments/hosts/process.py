"""Environment servers as processes of this machine: no container, nothing to build."""

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_pipe.environments.hosts.health import wait_until_healthy
from openenv_pipe.environments.hosts.package import code_digest, manifest_app
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.system.process import KILL_MARGIN_S, ManagedProcess, free_port, port_in_use
from openenv_pipe.system.resources import find_env

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig, ProcessHostConfig

ADDRESS = "127.0.0.1"
POLL_S = 0.05
NUM_PORTS_TO_TRY = 4  # a free port can be taken between our look and the server's bind
# A package's modules import each other from above it, or, as in its container, from inside it. Its
# folder comes last, so that its `types.py` or `client.py` hides nothing.
RUN = "import sys, uvicorn; sys.path.append(sys.argv.pop(1)); uvicorn.main()"
NEVER_S = 86_400  # pings of the server: our event loop may be blocked longer than its defaults
CREDENTIAL = re.compile(
    r"(^|_)(TOKEN|KEY|KEY_ID|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE
)


class ProcessHost(SupervisedHost):
    """`config.num_servers` processes, logs in `log_dir`/env-0.log and so on."""

    def __init__(self, env: "EnvConfig", config: "ProcessHostConfig", log_dir: Path) -> None:
        """Starts nothing yet. Raises ConfigError if the environment cannot be started this way."""
        servers = [
            ProcessServer(env, config, index, log_dir / f"env-{index}.log")
            for index in range(config.num_servers)
        ]
        super().__init__(
            env,
            servers,
            sessions_per_server=config.sessions_per_server,
            max_restarts=config.max_restarts,
        )
        self._package = None if env.command or env.package is None else find_env(env.package)

    @property
    def pids(self) -> list[int]:
        """Of the servers that were started, each the root of its process tree."""
        return [server.pid for server in self._servers if server.pid is not None]

    def facts(self) -> dict[str, str]:
        """See `Host.facts`. What a command starts is not known."""
        return {} if self._package is None else {"env_code": code_digest(self._package)}


class ProcessServer:
    """See `hosts.base.Server`."""

    def __init__(
        self, env: "EnvConfig", config: "ProcessHostConfig", index: int, log: Path
    ) -> None:
        self.log = log
        self.url = ""
        self._env = env
        self._config = config
        self._fixed_port = None if config.port is None else config.port + index
        self._command = server_command(env)
        self._process: ManagedProcess | None = None

    @property
    def pid(self) -> int | None:
        """Its guardian's process id, None before the first start."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """See `Server.start`. A port that we picked and that was taken meanwhile is replaced."""
        if self._fixed_port is not None:
            if port_in_use(self._fixed_port, ADDRESS):
                raise self._port_taken()
            await self._start_at(self._fixed_port)
            return
        for num_left in reversed(range(NUM_PORTS_TO_TRY)):
            port = free_port(ADDRESS)
            try:
                await self._start_at(port)
                return
            except HostError:
                if num_left == 0 or not port_in_use(port, ADDRESS):
                    raise

    async def died(self) -> str:
        while self._process.alive:
            await asyncio.sleep(POLL_S)
        return f"exit code {self._process.returncode}"

    async def stop(self) -> None:
        """See `Server.stop`. Blocks no event loop: many servers stop at the same time."""
        process = self._process
        if process is None:
            return
        process.begin_stop(self._config.stop_timeout_s)
        deadline = time.monotonic() + self._config.stop_timeout_s + KILL_MARGIN_S
        while process.alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S / 5)
        await asyncio.to_thread(process.stop, 0.0)

    async def _start_at(self, port: int) -> None:
        self.url = f"http://{ADDRESS}:{port}"
        values = {"{port}": str(port), "{host}": ADDRESS}
        self._process = ManagedProcess(
            [filled_in(part, values) for part in self._command],
            log=self.log,
            environment=server_environment(
                os.environ, self._env.variables, self._config.sessions_per_server
            ),
            cwd=find_env(self._env.package).parent if self._env.package else None,
            grace_s=self._config.stop_timeout_s,
        )
        try:
            await wait_until_healthy(self.url, self._config.start_timeout_s, self.died())
        except BaseException as error:
            await self.stop()
            if not isinstance(error, HostError):
                raise
            if self._fixed_port is not None and port_in_use(port, ADDRESS):
                raise self._port_taken() from error
            raise HostError(f"env {self._env.name!r}: {error}", self.log) from error

    def _port_taken(self) -> HostError:
        return HostError(
            f"env {self._env.name!r}: port {self._fixed_port} is used by another program; "
            "set host.port=null to let free ports be picked, or another number"
        )


def server_command(env: "EnvConfig") -> list[str]:
    """The command of one server, with {host} and {port} to fill in. Raises ConfigError."""
    if env.command:
        return list(env.command)
    if env.package is None:
        raise ConfigError(f"env {env.name!r} has neither env.package nor env.command; set one")
    package = find_env(env.package)
    return [
        *(_interpreter(env), "-c", RUN, str(package), f"{package.name}.{manifest_app(package)}"),
        *("--host", "{host}", "--port", "{port}", "--log-level", "warning"),
        *("--ws-per-message-deflate", "false", "--ws-max-size", str(env.max_message_mb * 2**20)),
        *("--ws-ping-interval", str(NEVER_S), "--ws-ping-timeout", str(NEVER_S)),
    ]


def _interpreter(env: "EnvConfig") -> str:
    """The Python that has what the package needs. Raises ConfigError."""
    if env.python is None:
        return sys.executable
    found = shutil.which(Path(env.python).expanduser())
    if found is None:
        raise ConfigError(
            f"env.python={env.python!r} is not a program here; expected the Python of an "
            "environment with the package's requirements, such as ./my_env/.venv/bin/python"
        )
    return str(Path(found).absolute())  # not resolved: a link is how an environment is told apart


def filled_in(part: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders and leave all other braces alone: arguments may be JSON."""
    for placeholder, value in values.items():
        part = part.replace(placeholder, value)
    return part


def server_environment(
    ours: Mapping[str, str], variables: Mapping[str, str], num_sessions: int
) -> dict[str, str]:
    """The environment variables of a server: ours, without what looks like a credential.

    Dropped are names that are or end in (_)TOKEN, KEY, KEY_ID, SECRET, PASSWORD, PASSWD or
    CREDENTIALS. An environment that needs one of them names it in `env.variables`.
    """
    kept = {name: value for name, value in ours.items() if not CREDENTIAL.search(name)}
    kept["MAX_CONCURRENT_ENVS"] = str(num_sessions)
    kept["PYTHONUNBUFFERED"] = "1"  # or a killed server takes its last log lines with it
    return kept | dict(variables)
