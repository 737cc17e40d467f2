"""Start programs in containers, which reach the gateway by a unix socket."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.schema import ProgramAgentConfig
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
from openenv_pipe.rollout.agents.gateway import Gateway
from openenv_pipe.rollout.agents.program import (
    Address,
    command_line,
    output_file,
    placeholders,
    program_variables,
    write_task,
)
from openenv_pipe.rollout.agents.sandbox import digests_of_program

GATEWAY = "gateway"  # the folder with the socket
READABLE_FOLDER, READABLE_FILE = 0o755, 0o644  # by the image's user


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramContainers:
    """Starts programs in containers of one image. It is a `Sandbox`."""

    config: DockerSandboxConfig
    daemon: GuardedDaemon
    gateway: Gateway  # which only the containers reach
    facts: dict[str, JsonValue]

    async def start(
        self, config: ProgramAgentConfig, address: Address, *, folder: Path, prompt: str, task: str
    ) -> ProgramContainer:
        """See `Sandbox.start`."""
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
async def containers_of_programs(
    config: ProgramAgentConfig, logs: Path, *, level: str
) -> AsyncIterator[ProgramContainers]:
    """Get the daemon, the image and a gateway ready, and remove all containers after the block.

    level: of the gateway.

    Raises:
        HostError: the daemon or a pull of the image fails.
        ConfigError: the image is missing, and so is the `docker` command.
    """
    assert isinstance(config.sandbox, DockerSandboxConfig)
    sandbox, daemon = config.sandbox, GuardedDaemon(logs)
    await daemon.open(program_recipe(sandbox), sandbox.build_timeout_s)
    try:
        folder = daemon.folder / GATEWAY
        folder.mkdir()
        folder.chmod(READABLE_FOLDER)
        mounted = (Path(path).expanduser() for path in sandbox.mounts.values())
        files = [path for path in mounted if path.is_file()]
        facts = await asyncio.to_thread(digests_of_program, files)
        image: JsonValue = {"name": daemon.image.name, "id": daemon.image.id}
        yield ProgramContainers(
            config=sandbox,
            daemon=daemon,
            gateway=Gateway(level=level, path=folder / SOCKET, url=f"http://127.0.0.1:{PORT}"),
            facts={**facts, "program_image": image},
        )
    finally:
        await asyncio.shield(daemon.close())


def check_sandbox(config: ProgramAgentConfig) -> str:
    """Return what is started, for people. Raises ConfigError if it cannot work here."""
    assert isinstance(config.sandbox, DockerSandboxConfig)
    if sys.platform != "linux":
        raise ConfigError(
            "agent.sandbox.type=docker: containers reach the model through a socket, which Docker "
            "shares on Linux only; set agent/sandbox=none"
        )
    for inside, path in config.sandbox.mounts.items():
        if not Path(path).expanduser().exists():
            raise ConfigError(
                f"agent.sandbox.mounts: there is no {path!r} to mount at {inside}; name a file or "
                "folder of this machine"
            )
    return f"a program in containers of {config.sandbox.image}"
