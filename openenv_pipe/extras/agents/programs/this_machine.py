"""Sandbox `none`: programs are processes of this machine."""

import errno
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.environments.hosts.process import absolute_part
from openenv_pipe.extras.agents.programs.program import SHORTER
from openenv_pipe.extras.agents.schema import NoSandboxConfig
from openenv_pipe.rollout.sandbox import Program, ProgramPaths, ProgramStartError
from openenv_pipe.system.child_environment import child_environment
from openenv_pipe.system.process import ManagedProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class ThisMachine:
    """Starts programs as processes of this machine. It is a `Sandbox`."""

    files: Sequence[Path]
    facts: dict[str, JsonValue] = field(default_factory=dict)
    socket: None = None
    url: str = ""

    def paths(self, folder: Path) -> ProgramPaths:
        return ProgramPaths(home=str(folder), task_folder=str(folder), python=sys.executable)

    async def start(self, program: Program) -> ManagedProcess:
        folder = program.folder
        folder.mkdir(mode=0o700)
        program.write_files(folder, folder)
        # XDG_CONFIG_HOME and the like would lead a program out of its home, to your own agent's
        # files.
        inherited = child_environment(without=["XDG_*"])
        paths = filter(None, (inherited.get("PYTHONPATH", ""), str(Path.cwd())))
        try:
            return ManagedProcess(
                program.command,
                log=program.output,
                environment={
                    **inherited,
                    "PYTHONPATH": os.pathsep.join(paths),
                    **program.variables,
                },
                cwd=folder,
                grace_s=program.grace_s,
                scratch=folder,
            )
        except OSError as error:
            # No guardian has started that would remove it.
            shutil.rmtree(folder)
            program.output.unlink(missing_ok=True)
            if error.errno != errno.E2BIG:
                raise
            problem = f"agent.command and agent.variables: {error.strerror}; {SHORTER}"
            raise ProgramStartError(problem) from error


@asynccontextmanager
async def this_machine(
    config: NoSandboxConfig, command: Sequence[str], logs: Path
) -> AsyncIterator[ThisMachine]:
    parts = (Path(absolute_part(part, Path.cwd())) for part in command[1:])
    yield ThisMachine(files=[path for path in parts if path.is_absolute() and path.is_file()])
