"""Where the programs of a run are: the interface of a sandbox, and that of `type: none`."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from openenv_pipe.config.schema import ProgramAgentConfig
from openenv_pipe.environments.hosts.process import absolute_part
from openenv_pipe.rollout.agents.gateway import Gateway
from openenv_pipe.rollout.agents.program import Address, RunningProgram, start_process
from openenv_pipe.system.files import digest_of_file


class Sandbox(Protocol):
    """Starts the programs of a run.

    The `build` of a sandbox's type gives one in an asynchronous context manager. It is called with
    the agent's configuration, the folder for logs, and the level of the gateway (`level=`). Its
    `check` is called with the agent's configuration, and returns what would be started, for people.
    """

    @property
    def gateway(self) -> Gateway:
        """What the programs reach. It does not serve yet."""

    @property
    def facts(self) -> dict[str, JsonValue]:
        """Digests of what the programs consist of, for the run's record."""

    async def start(
        self, config: ProgramAgentConfig, address: Address, *, folder: Path, prompt: str, task: str
    ) -> RunningProgram:
        """Start the program of one episode, with its output in `output_file(folder)`.

        Args:
            folder: does not exist yet, and is the program's own.
            task: JSON, for programs that want more than the prompt.

        Raises:
            ProgramStartError: the task does not fit into the program's arguments.
            ConfigError: agent.files names a file outside of the program's folder.
            HostError: the program's host fails.
            OSError: the folder cannot be written.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ThisMachine:
    """Starts programs as processes of this machine. It is a `Sandbox`."""

    gateway: Gateway
    facts: dict[str, JsonValue]

    async def start(
        self, config: ProgramAgentConfig, address: Address, *, folder: Path, prompt: str, task: str
    ) -> RunningProgram:
        """See `Sandbox.start`."""
        return await start_process(config, address, folder=folder, prompt=prompt, task=task)


@asynccontextmanager
async def this_machine(
    config: ProgramAgentConfig, logs: Path, *, level: str
) -> AsyncIterator[ThisMachine]:
    """Give the sandbox of `type: none`. Raises OSError if its gateway cannot listen."""
    parts = (Path(absolute_part(part, Path.cwd())) for part in config.command[1:])
    files = [path for path in parts if path.is_absolute() and path.is_file()]
    facts = await asyncio.to_thread(digests_of_program, files)
    yield ThisMachine(gateway=Gateway(level=level), facts=facts)


def digests_of_program(files: Iterable[Path]) -> dict[str, JsonValue]:
    """Return the digest of each file by its name, as a fact of the run. Blocks."""
    return {"program": {path.name: digest_of_file(path) for path in files}}
