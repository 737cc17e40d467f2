"""Start programs of `agent=program` in containers without a network.

Such a container has only a loopback interface. What it sends to one port of that interface arrives
at a unix socket of this machine, on which the gateway listens (`socket_proxy.py`).
"""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.types import Mount
from pydantic import JsonValue

from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.extras.containers.docker.daemon import DaemonErrors, explained
from openenv_pipe.extras.containers.docker.guarded import GuardedDaemon
from openenv_pipe.extras.containers.docker.image import Recipe, pull_recipe
from openenv_pipe.extras.containers.docker.running import (
    SHARED_FOLDER,
    RunningContainer,
    behind_proxy,
    entry,
    restrictions,
)
from openenv_pipe.extras.containers.schema import DockerSandboxConfig
from openenv_pipe.rollout.sandbox import Program, ProgramPaths

# Paths in the container.
HOME = "/home/openenv-pipe"  # where the program runs; in memory
TASK_FOLDER = f"{SHARED_FOLDER}/task"
GATEWAY_FOLDER = f"{SHARED_FOLDER}/gateway"
PYTHON = "python3"
# Below TASK_FOLDER: the files that are copied to HOME, where the program may change them.
FILES = "files"
COPY = 'cp -R "$0/." . && exec "$@"'
SOCKET = "socket"  # in the folder that is GATEWAY_FOLDER
PORT = 8000  # of the container's loopback interface
GATEWAY = "gateway"  # the folder with the socket
READABLE_FOLDER, READABLE_FILE = 0o755, 0o644  # by the image's user


def program_recipe(config: DockerSandboxConfig) -> Recipe:
    return pull_recipe(config.image, "agent.sandbox")


class ProgramContainer:
    """The container of one program. It is used like a `system.process.ManagedProcess`."""

    def __init__(
        self, daemon: GuardedDaemon, config: DockerSandboxConfig, log: Path, files: Path
    ) -> None:
        """log: gets the output. files: a folder to remove when the program ends."""
        self.pid = 0  # of the container's first process, as this machine counts
        self._config = config
        self._log = log
        self._files = files
        self._running = RunningContainer(daemon.client, log, "program")

    @property
    def returncode(self) -> int | None:
        return self._running.state.get("ExitCode")

    async def exited(self) -> str:
        """Return when the program has ended, with the cause: 'exit code 1'."""
        await self._running.ended.wait()
        return self._running.failure or f"exit code {self.returncode}"

    async def start(self, options: Mapping[str, Any]) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.touch()
        try:
            await self._running.start(options)
            self.pid = (await self._running.attributes())["State"]["Pid"]
        except BaseException as error:
            await self._remove(0.0)
            if isinstance(error, DaemonErrors):
                raise HostError(
                    f"Docker cannot start a program in a container of agent.sandbox.image="
                    f"{self._config.image}: {explained(error)}"
                ) from error
            raise

    async def stopped(self, timeout_s: float) -> None:
        """End the program: SIGTERM, and after `timeout_s` SIGKILL for the whole container.

        Raises HostError if the container could not be watched to its end.
        """
        running = self._running
        failure = running.failure
        await self._remove(timeout_s)
        if failure:
            raise HostError(f"the container of a program cannot be used: {failure}")
        if running.state.get("OOMKilled"):
            with self._log.open("a") as file:
                limit = f"agent.sandbox.mem_limit_mb={self._config.mem_limit_mb}"
                file.write(f"\n[the container was out of memory: {limit}]\n")

    async def _remove(self, grace_s: float) -> None:
        await self._running.remove(grace_s)
        await asyncio.to_thread(shutil.rmtree, self._files, ignore_errors=True)


def program_options(
    daemon: GuardedDaemon,
    config: DockerSandboxConfig,
    *,
    command: Sequence[str],
    variables: Mapping[str, str],
    task_folder: Path,
    gateway_folder: Path,
) -> dict[str, Any]:
    """Return the keyword arguments of `containers.create` for one program.

    task_folder: with the task's files and the folder FILES.
    gateway_folder: with the socket SOCKET.
    """
    folders = {TASK_FOLDER: task_folder, GATEWAY_FOLDER: gateway_folder}
    folders |= {inside: Path(path).expanduser() for inside, path in config.mounts.items()}
    with_files = ["sh", "-c", COPY, f"{TASK_FOLDER}/{FILES}", *command]
    in_memory = f"size={config.tmp_mb}m,mode=1777,exec"  # agents unpack programs and run them
    return {
        **restrictions(config),
        "image": daemon.image.id,
        "environment": dict(variables),
        "labels": dict(daemon.labels),
        "network_mode": "none",
        "mounts": [
            Mount(inside, str(folder.absolute()), type="bind", read_only=True)
            for inside, folder in folders.items()
        ],
        "tmpfs": {"/tmp": in_memory, HOME: in_memory},
        "working_dir": HOME,
        **entry(behind_proxy(str(PORT), f"{GATEWAY_FOLDER}/{SOCKET}", with_files)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramContainers:
    """Starts programs in containers of one image. It is a `Sandbox`."""

    config: DockerSandboxConfig
    daemon: GuardedDaemon
    socket: Path  # in a folder that only the containers have
    files: Sequence[Path]
    facts: dict[str, JsonValue]
    url: str = f"http://127.0.0.1:{PORT}"

    def paths(self, folder: Path) -> ProgramPaths:
        return ProgramPaths(home=HOME, task_folder=TASK_FOLDER, python=PYTHON)

    async def start(self, program: Program) -> ProgramContainer:
        files = self.daemon.folder / program.folder.name  # removed by the guard if we are killed
        (files / FILES).mkdir(parents=True)
        program.write_files(files, files / FILES)
        for path in (files, *files.rglob("*")):
            path.chmod(READABLE_FOLDER if path.is_dir() else READABLE_FILE)
        container = ProgramContainer(self.daemon, self.config, program.output, files)
        await container.start(
            program_options(
                self.daemon,
                self.config,
                command=program.command,
                variables=program.variables,
                task_folder=files,
                gateway_folder=self.socket.parent,
            )
        )
        return container


@asynccontextmanager
async def containers_of_programs(
    config: DockerSandboxConfig, command: Sequence[str], logs: Path
) -> AsyncIterator[ProgramContainers]:
    """Get the daemon and the image ready, and remove all containers after the block.

    command: is in the image, or in `config.mounts`. Raises HostError and ConfigError.
    """
    daemon = GuardedDaemon(logs)
    await daemon.open(program_recipe(config), config.build_timeout_s)
    try:
        folder = daemon.folder / GATEWAY
        folder.mkdir()
        folder.chmod(READABLE_FOLDER)
        mounted = (Path(path).expanduser() for path in config.mounts.values())
        yield ProgramContainers(
            config=config,
            daemon=daemon,
            socket=folder / SOCKET,
            files=[path for path in mounted if path.is_file()],
            facts={"program_image": {"name": daemon.image.name, "id": daemon.image.id}},
        )
    finally:
        await asyncio.shield(daemon.close())


def check_sandbox(config: DockerSandboxConfig) -> str:
    """Describe in a line what is started. Raises ConfigError if it cannot work here."""
    if sys.platform != "linux":
        raise ConfigError(
            "agent.sandbox.type=docker: containers reach the model through a socket, which Docker "
            "shares on Linux only; set agent/sandbox=none"
        )
    for inside, path in config.mounts.items():
        if not Path(path).expanduser().exists():
            raise ConfigError(
                f"agent.sandbox.mounts: there is no {path!r} to mount at {inside}; name a file or "
                "folder of this machine"
            )
    return f"a program in containers of {config.image}"
