"""Where the programs of `agent=program` run: the interface of a sandbox, and what it starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramPaths:
    """Where a program finds what it needs, as it sees it itself."""

    home: str  # its current folder
    task_folder: str  # with the task's files
    python: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    folder: Path  # of the program alone; it does not exist yet
    output: Path  # the file that gets what it writes to stdout and stderr
    command: Sequence[str]
    variables: Mapping[str, str]
    task_files: Mapping[str, str]  # texts for the task's folder, by name
    files: Mapping[str, str]  # texts for its home, by path in it
    grace_s: float  # between SIGTERM and SIGKILL

    def write_files(self, task_folder: Path, home: Path) -> None:
        """Write its files into two folders, which may be the same one. Raises OSError."""
        for folder, files in ((task_folder, self.task_files), (home, self.files)):
            for name, text in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text.encode(errors="replace"))


class RunningProgram(Protocol):
    @property
    def pid(self) -> int:
        """The id of the parent of the program's processes."""

    @property
    def returncode(self) -> int | None:
        """None while it runs; then its code, or 128 + N if signal N ended it."""

    async def exited(self) -> str:
        """Return when it has ended, with the cause: 'exit code 1'."""

    async def stopped(self, timeout_s: float) -> None:
        """End all of its processes, with SIGKILL if they still run `timeout_s` after SIGTERM."""


class ProgramStartError(Exception):
    """The program of one episode cannot be started with this task. The text says why."""


class Sandbox(Protocol):
    """Starts the programs of a run.

    The `build` of a sandbox's type gives one in an asynchronous context manager. It is called with
    the sandbox's configuration, the command of the programs, and the folder for logs. Its `check`
    is called with the sandbox's configuration, and describes in a line what would be started.
    """

    @property
    def socket(self) -> Path | None:
        """The unix socket at which programs reach the run; None: any port of this machine."""

    @property
    def url(self) -> str:
        """How programs reach that socket; empty if there is none."""

    @property
    def files(self) -> Sequence[Path]:
        """The files of this machine that the programs consist of."""

    @property
    def facts(self) -> dict[str, JsonValue]:
        """What else the programs consist of, for the run's record."""

    def paths(self, folder: Path) -> ProgramPaths:
        """Return the paths of the program whose `Program.folder` this is."""

    async def start(self, program: Program) -> RunningProgram:
        """Start the program of one episode.

        Raises:
            ProgramStartError: the task does not fit into the program's arguments.
            HostError: the program's host fails.
            OSError: the folder cannot be written.
        """
