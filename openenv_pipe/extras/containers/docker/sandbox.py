"""Start programs in containers, which reach the gateway by a unix socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.config.schema import DockerSandboxConfig, ProgramAgentConfig
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
from openenv_pipe.rollout.agents.gateway import Gateway
from openenv_pipe.rollout.agents.program import (
    Address,
    command_line,
    output_file,
    placeholders,
    program_variables,
    write_task,
)

GATEWAY = "gateway"  # the folder with the socket
READABLE_FOLDER, READABLE_FILE = 0o755, 0o644  # by the image's user


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramContainers:
    """Starts programs in containers of one image."""

    config: DockerSandboxConfig
    daemon: GuardedDaemon
    gateway: Gateway  # which only the containers reach

    async def start(
        self, config: ProgramAgentConfig, address: Address, *, folder: Path, prompt: str, task: str
    ) -> ProgramContainer:
        """Start a program. It is a `StartProgram`."""
        values = placeholders(address, TASK_FOLDER, python=PYTHON, prompt=prompt)
        command = command_line(config.command, values)
        files = self.daemon.folder / folder.name  # removed by the guard if this process is killed
        (files / FILES).mkdir(parents=True)
        write_task(config, files, files / FILES, values, prompt=prompt, task=task)
        for path in (files, *files.rglob("*")):
            path.chmod(READABLE_FOLDER if path.is_dir() else READABLE_FILE)
        program = ProgramContainer(self.daemon, self.config, output_file(folder), files)
        await program.start(
            program_options(
                self.daemon,
                self.config,
                command=command,
                variables=program_variables(config, address, values, home=HOME),
                task_folder=files,
                gateway_folder=self.daemon.folder / GATEWAY,
                max_output_mb=config.max_output_mb,
            )
        )
        return program


@asynccontextmanager
async def opened(
    config: DockerSandboxConfig, logs: Path, *, level: str = "tokens"
) -> AsyncIterator[ProgramContainers]:
    """Get the daemon, the image and a gateway ready, and remove all containers after the block.

    level: of the gateway.

    Raises:
        HostError: the daemon or a pull of the image fails.
        ConfigError: the image is missing, and so is the `docker` command.
    """
    daemon = GuardedDaemon(logs)
    await daemon.open(program_recipe(config), config.build_timeout_s)
    try:
        folder = daemon.folder / GATEWAY
        folder.mkdir()
        folder.chmod(READABLE_FOLDER)
        gateway = Gateway(level=level, path=folder / SOCKET, url=f"http://127.0.0.1:{PORT}")
        yield ProgramContainers(config=config, daemon=daemon, gateway=gateway)
    finally:
        await asyncio.shield(daemon.close())
