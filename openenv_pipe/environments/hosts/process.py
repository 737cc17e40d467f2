"""Host `process`: environment servers as processes on this machine, without containers."""

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from openenv_pipe.environments.hosts.factory import FACTORY_ERROR, creation_error
from openenv_pipe.environments.hosts.package import (
    VARIABLES,
    code_facts,
    manifest_app,
    package_of,
)
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import ConfigError, HostError, last_lines
from openenv_pipe.system.child_environment import (
    child_environment,
    given_variables,
    names_left_out,
)
from openenv_pipe.system.http import bearer
from openenv_pipe.system.optional_packages import reject_missing_requirements
from openenv_pipe.system.process import ManagedProcess, free_port, port_in_use
from openenv_pipe.system.readiness import (
    NotReadyError,
    check_health,
    unless_dead,
    wait_until_healthy,
)
from openenv_pipe.system.resources import find_env, short_path
from openenv_pipe.system.secrets import ENV_KEY, ENV_PORT, SERVER_SIDE, new_key
from openenv_pipe.system.supervisor import RestartBudget

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig, ProcessHostConfig

ADDRESS = "127.0.0.1"
NUM_PORTS_TO_TRY = 4  # another program may take a free port before the server binds it
SERVE = Path(__file__).with_name("serve_package.py")
PACKAGE = "{package}"  # in env.command and env.variables: the package's folder
FOLDER = "{folder}"  # in env.variables: the current folder
NEVER_S = 86_400  # between the server's pings, which a busy event loop would answer too late
HEALTH_LIMIT_S = 5.0
UNPROTECTED = (
    "answers requests without a key, so every user of this machine can use it: it does not run on "
    "uvicorn, or its Python ignores PYTHONPATH; use host=docker, or let it reject requests whose "
    f"header Authorization is not 'Bearer KEY' with the KEY of the variable {ENV_KEY}"
)

_log = logging.getLogger(__name__)


class ProcessHost(SupervisedHost):
    """A host with `config.num_servers` processes, whose logs are `log_dir`/env-0.log and so on."""

    def __init__(self, env: "EnvConfig", config: "ProcessHostConfig", log_dir: Path) -> None:
        """Prepare the host without starting it. Raises ConfigError if it could not be started."""
        key = new_key("an environment's servers")
        self._processes = [
            EnvProcess(env, config, index, log_dir / f"env-{index}.log", key)
            for index in range(config.num_servers)
        ]
        super().__init__(
            env,
            self._processes,
            sessions_per_server=config.sessions_per_server,
            restart=RestartBudget(config.max_restarts, "host.max_restarts").restart,
            access=bearer(key),
        )
        self.key = key
        self._config = config
        self._package = package_of(env)

    async def start(self) -> None:
        """See `Host.start`. The error says why an environment cannot be created."""
        try:
            await super().start()
        except HostError as error:
            if FACTORY_ERROR not in str(error) or (why := await self._creation_error()) == "":
                raise
            explained = HostError(f"{error}\ncreating it raised {why}")
            explained.log = error.log  # its last lines are in the message already
            raise explained from error
        if not await self.is_protected():
            _log.warning("env %r: the server at %s %s", self._env.name, self.urls[0], UNPROTECTED)

    async def is_protected(self) -> bool:
        """Return whether the servers require the key, tested by a request to the first without it.

        `system/server_side` makes uvicorn servers require it, whatever their command is.
        """
        return await check_health(self._processes[0].url, HEALTH_LIMIT_S) is not None

    def launch(self) -> None:
        """Begin to start the servers, which `start` then waits for."""
        for server in self._processes:
            server.launch()

    def move_logs(self, folder: Path) -> None:
        """Move the logs of servers that were launched, and the folders that they run in."""
        for server in self._processes:
            server.move_log(folder)

    def kill(self) -> None:
        """End servers that were launched, without an event loop."""
        for server in self._processes:
            server.kill()

    async def _creation_error(self) -> str:
        env, config = self._env, self._config
        if self._package is None:
            return ""
        return await asyncio.to_thread(
            creation_error,
            [_interpreter(env)],
            self._package,
            f"{self._package.name}.{manifest_app(self._package)}",
            _environment(env, config.sessions_per_server),
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the started servers, each the root of its process tree."""
        return [server.pid for server in self._processes if server.pid is not None]

    def facts(self) -> dict[str, JsonValue]:
        """See `Host.facts`."""
        return code_facts(self._package)


class EnvProcess:
    """One server process, a `system.supervisor.RestartableServer`.

    It runs in a folder of its own beside its log, `env-0.files`, so that what a server writes does
    not end up among the user's files. The folder is removed with the server if it is empty.
    """

    def __init__(
        self, env: "EnvConfig", config: "ProcessHostConfig", index: int, log: Path, key: str
    ) -> None:
        """key: the server requires it of every request."""
        self.log = log
        self._key = key
        self._folder = log.with_suffix(".files")
        self.url = ""
        self._env = env
        self._config = config
        self._fixed_port = None if config.port is None else config.port + index
        self._command = server_command(env)
        self._environment = _environment(env, config.sessions_per_server)
        self._process: ManagedProcess | None = None
        self._launched_port: int | None = None  # where `launch` has begun to start the server

    def launch(self) -> None:
        """Start the command at a free port, without waiting until the server answers."""
        self._launched_port = free_port(ADDRESS)
        self._launch_at(self._launched_port)

    def move_log(self, folder: Path) -> None:
        """Move the log and the server's folder, both of which a running server keeps open."""
        folder.mkdir(parents=True, exist_ok=True)
        self.log = self.log.rename(folder / self.log.name)
        self._folder = self._folder.rename(folder / self._folder.name)

    def kill(self) -> None:
        """End the server at once, without an event loop."""
        if self._process is not None:
            self._process.stop(0.0)

    @property
    def pid(self) -> int | None:
        """The process id of the server's guardian; None before the first start."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """See `RestartableServer.start`. Tries another port if the chosen one is taken."""
        if self._fixed_port is not None:
            if port_in_use(self._fixed_port, ADDRESS):
                raise self._port_taken()
            self._launch_at(self._fixed_port)
            await self._answers_at(self._fixed_port)
            return
        for num_left in reversed(range(NUM_PORTS_TO_TRY)):
            launched, self._launched_port = self._launched_port, None
            port = launched or free_port(ADDRESS)
            try:
                if launched is None:
                    self._launch_at(port)
                await self._answers_at(port)
                return
            except HostError:
                if num_left == 0 or not port_in_use(port, ADDRESS):
                    raise

    async def died(self) -> str:
        assert self._process is not None
        return await self._process.exited()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stopped(self._config.stop_timeout_s)
        with suppress(OSError):  # The server has written something, or was never started.
            self._folder.rmdir()

    def _launch_at(self, port: int) -> None:
        self.url = f"http://{ADDRESS}:{port}"
        values = {"{port}": str(port), "{host}": ADDRESS}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = ManagedProcess(
            [filled_in(part, values) for part in self._command],
            log=self.log,
            environment=self._with_key(port),
            cwd=self._folder,
            grace_s=self._config.stop_timeout_s,
        )

    def _with_key(self, port: int) -> dict[str, str]:
        """Return the server's variables, and those that let it reject other users' requests."""
        paths = (str(SERVER_SIDE), self._environment.get("PYTHONPATH", ""))
        return self._environment | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            ENV_KEY: self._key,
            ENV_PORT: str(port),
        }

    async def _answers_at(self, port: int) -> None:
        """Wait until the server answers; stop it if it does not. Raises HostError."""
        try:
            healthy = wait_until_healthy(
                self.url,
                timeout_s=self._config.start_timeout_s,
                access=bearer(self._key),
                key="host.start_timeout_s",
            )
            await unless_dead(healthy, self.died())
        except BaseException as error:
            await self.stop()
            if not isinstance(error, NotReadyError):
                raise
            if self._fixed_port is not None and port_in_use(port, ADDRESS):
                raise self._port_taken() from error
            note = names_left_out(self._environment, last_lines(self.log), VARIABLES)
            failure = HostError(f"env {self._env.name!r}: {error}", self.log)
            failure.args = ("\n".join(filter(None, (str(failure), note))),)
            raise failure from error

    def _port_taken(self) -> HostError:
        return HostError(
            f"env {self._env.name!r}: port {self._fixed_port} is used by another program; "
            "set another host.port, or null for any free port"
        )


def server_command(env: "EnvConfig") -> list[str]:
    """Return the command of one server, with the placeholders {host} and {port}.

    Raises ConfigError: the configuration or the package names no command.
    """
    if env.command:
        return [absolute_part(part, _command_folder(env)) for part in _command(env)]
    if env.package is None:
        raise ConfigError(f"env {env.name!r} has neither env.package nor env.command; set one")
    package = find_env(env.package).absolute()
    return [
        *(_interpreter(env), str(SERVE), str(package), f"{package.name}.{manifest_app(package)}"),
        *("--host", "{host}", "--port", "{port}", "--log-level", "warning"),
        *("--ws-per-message-deflate", "false", "--ws-max-size", str(env.max_message_mb * 2**20)),
        *("--ws-ping-interval", str(NEVER_S), "--ws-ping-timeout", str(NEVER_S)),
    ]


def check_process_host(env: "EnvConfig", config: "ProcessHostConfig") -> str:
    """Return what starts the servers. Raises ConfigError if something that it needs is missing."""
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as logs:
        ProcessHost(env, config, Path(logs))
    if env.command:
        return f"started by {find_program(env)}"
    assert env.package is not None
    package = find_env(env.package)
    if env.python is None:
        reject_missing_requirements(package)
    return short_path(package)


def find_program(env: "EnvConfig") -> str:
    """Return the program that env.command starts with.

    A name with a slash is relative to the folder beside the package, or else to the current one.

    Raises ConfigError: the program is not there.
    """
    program = _command(env)[0]
    folder = _command_folder(env)
    path = str(folder / program) if "/" in program else program
    if shutil.which(path, path=env.variables.get("PATH")) is None:
        where = f"in {folder}" if "/" in program else "on PATH"
        raise ConfigError(f"env.command starts with {program!r}, which is not a program {where}")
    return program


def _command(env: "EnvConfig") -> list[str]:
    """Return env.command with the package's folder filled in."""
    assert env.command is not None
    return [_with_package(env, "env.command", part) for part in env.command]


def _command_folder(env: "EnvConfig") -> Path:
    """Return the folder to which relative paths of env.command belong."""
    return find_env(env.package).parent if env.package else Path.cwd()


def absolute_part(part: str, folder: Path) -> str:
    """Return the absolute path of a file that a part of a command names, else the part."""
    path = folder / part
    with suppress(OSError):  # The part is too long for a path, as a program after -c may be.
        if ("/" in part or part.endswith(".py")) and path.exists():
            return str(path.absolute())
    return part


def _with_package(env: "EnvConfig", key: str, text: str) -> str:
    """Fill in the package's folder. Raises ConfigError if there is no package."""
    if PACKAGE not in text:
        return text
    if env.package is None:
        raise ConfigError(f"{key} contains {PACKAGE}, but env.package is null; set env.package")
    return text.replace(PACKAGE, str(find_env(env.package).absolute()))


def _environment(env: "EnvConfig", num_sessions: int) -> dict[str, str]:
    """Return the environment variables of a server process.

    PYTHONPATH lets a command import the modules in the folder of its relative paths.
    """
    own = {
        name: _with_package(env, f"{VARIABLES}.{name}", value).replace(FOLDER, str(Path.cwd()))
        for name, value in server_variables(env, num_sessions).items()
    }
    complete = child_environment() | own
    if env.command:
        paths = [complete.get("PYTHONPATH", ""), str(_command_folder(env))]
        complete["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return complete


def _interpreter(env: "EnvConfig") -> str:
    """Return the path of `env.python`, by default this process's Python. Raises ConfigError."""
    if env.python is None:
        return sys.executable
    found = shutil.which(Path(env.python).expanduser())
    if found is None:
        raise ConfigError(
            f"env.python={env.python!r} is not a program here; expected the Python of a "
            "virtual environment with the package's requirements, such as ./my_env/.venv/bin/python"
        )
    return str(Path(found).absolute())  # not resolved: Python finds its environment by the link


def filled_in(part: str, values: Mapping[str, str]) -> str:
    """Replace placeholders in a part of a command. Other braces may belong to JSON arguments."""
    for placeholder, value in values.items():
        part = part.replace(placeholder, value)
    return part


def server_variables(env: "EnvConfig", num_sessions: int) -> dict[str, str]:
    """Return the environment variables that a server gets wherever it runs. Raises ConfigError."""
    return {
        "MAX_CONCURRENT_ENVS": str(num_sessions),
        "PYTHONUNBUFFERED": "1",  # without it a killed server's last lines are lost
        **given_variables(env.variables, VARIABLES),
    }
