"""Start programs in containers, which reach the gateway by a unix socket."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.containers.docker.guarded import GuardedDaemon
from openenv_pipe.extras.containers.docker.program import (
    FILES,
    HOME,
    PORT,
    PYTHON,
    SOCKET,
    TASK_FOLDER,
    ProgramContainer,
    program_options,
    program_recipe,
)
from openenv_pipe.extras.containers.schema import DockerSandboxConfig
from openenv_pipe.rollout.sandbox import Program, ProgramPaths

GATEWAY = "gateway"  # the folder with the socket
READABLE_FOLDER, READABLE_FILE = 0o755, 0o644  # by the image's user


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
    """Return what is started, for people. Raises ConfigError if it cannot work here."""
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
