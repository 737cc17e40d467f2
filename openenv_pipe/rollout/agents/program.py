"""A program as a process: its folder, its environment variables, its output."""

import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openenv_pipe.config.schema import ProgramAgentConfig
from openenv_pipe.environments.hosts.process import absolute_part, filled_in
from openenv_pipe.errors import ConfigError
from openenv_pipe.rollout.agents.calls import MODEL
from openenv_pipe.system.child_environment import child_environment, given_variables
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.untrusted_text import visible

KEPT_BYTES = 8000  # of the output, one half from its beginning and one from its end
PYTHON = "{python}"
VARIABLES = "agent.variables"
PROMPT_FILE, TASK_FILE = "prompt.txt", "task.json"
MAX_ARGUMENT_BYTES = 131_071  # MAX_ARG_STRLEN of Linux, without the NUL byte
SHORTER = "name {prompt_file} or {task_file} in the place of {prompt}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a program reaches its model and its environment."""

    url: str  # of the gateway
    key: str

    @property
    def env_url(self) -> str:
        return f"{self.url}/openenv/{self.key}"

    def variables(self) -> dict[str, str]:
        """Return the environment variables that clients of the four dialects look for."""
        keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY")
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "ANTHROPIC_BASE_URL": self.url,
            "GOOGLE_GEMINI_BASE_URL": self.url,
            "OPENENV_URL": self.env_url,
            "OPENENV_MODEL": MODEL,
            **dict.fromkeys(keys, self.key),
        }


class RunningProgram(Protocol):
    """A program that runs, or has ended."""

    @property
    def pid(self) -> int:
        """Of the parent of the program's processes."""

    @property
    def returncode(self) -> int | None:
        """None while it runs; then its code, or 128 + N if signal N ended it."""

    async def exited(self) -> str:
        """Return when it has ended, with the cause: 'exit code 1'."""

    async def stopped(self, timeout_s: float) -> None:
        """End all of its processes, by SIGKILL those that run `timeout_s` after SIGTERM."""


class ProgramStartError(Exception):
    """The program of one episode cannot be started with this task. The text says why."""


def check_program(config: ProgramAgentConfig) -> str:
    """Return what is started, for people.

    Raises:
        ConfigError: it cannot be started as a process of this machine.
    """
    program = config.command[0]
    path = absolute_part(program, Path.cwd())
    if program == PYTHON or shutil.which(path, path=config.variables.get("PATH")):
        return f"a program, {program}"
    problem = f"agent.command starts with {program!r}, which is not a program here or on PATH"
    if config.reward_from == "harbor":
        problem += "; install Harbor with: uv tool install harbor"
    raise ConfigError(problem)


async def start_process(
    config: ProgramAgentConfig, address: Address, *, folder: Path, prompt: str, task: str
) -> ManagedProcess:
    """Start a program as a process (`Sandbox.start`).

    folder: its current folder and home, which is removed when it ends.
    """
    values = {
        "{start_folder}": str(Path.cwd()),
        "{results}": str(results_folder(folder)),
        **placeholders(address, str(folder), python=sys.executable, prompt=prompt),
    }
    command = command_line([absolute_part(part, Path.cwd()) for part in config.command], values)
    folder.mkdir(mode=0o700)
    write_task(config, folder, folder, values, prompt=prompt, task=task)
    # XDG_CONFIG_HOME and the like would lead a program out of its home, to your own agent's files.
    inherited = child_environment(without=["XDG_*"])
    paths = _joined(inherited.get("PYTHONPATH", ""), str(Path.cwd()))
    try:
        return ManagedProcess(
            command,
            log=output_file(folder),
            environment={
                **inherited,
                "PYTHONPATH": paths,
                **program_variables(config, address, values, home=str(folder)),
            },
            cwd=folder,
            grace_s=config.grace_s,
            scratch=folder,
        )
    except OSError as error:
        # No guardian has started, which would remove it.
        shutil.rmtree(folder)
        output_file(folder).unlink(missing_ok=True)
        if error.errno != errno.E2BIG:
            raise
        problem = f"agent.command and agent.variables: {error.strerror}; {SHORTER}"
        raise ProgramStartError(problem) from error


def command_line(parts: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a program's arguments with their placeholders filled in.

    Raises ProgramStartError: Linux would reject one of them.
    """
    arguments = [filled_in(part, values) for part in parts]
    longest = max(len(argument.encode()) for argument in arguments)
    if longest > MAX_ARGUMENT_BYTES:
        raise ProgramStartError(
            f"an argument of agent.command has {longest:,} bytes, and Linux allows "
            f"{MAX_ARGUMENT_BYTES:,}; {SHORTER}"
        )
    return arguments


def placeholders(address: Address, folder: str, *, python: str, prompt: str) -> dict[str, str]:
    """Return what is filled in for each placeholder.

    folder: where the program finds the task's files.
    """
    return {
        PYTHON: python,
        "{prompt_file}": f"{folder}/{PROMPT_FILE}",
        "{task_file}": f"{folder}/{TASK_FILE}",
        "{base_url}": f"{address.url}/v1",
        "{api_key}": address.key,
        "{model}": MODEL,
        "{env_url}": address.env_url,
        "{prompt}": as_argument(prompt),  # the last to fill in
    }


def as_argument(text: str) -> str:
    """Return a text as an argument can hold it: without NUL bytes and lone surrogates."""
    return text.replace("\0", "").encode(errors="replace").decode()


def write_task(
    config: ProgramAgentConfig,
    folder: Path,
    files: Path,
    values: Mapping[str, str],
    *,
    prompt: str,
    task: str,
) -> None:
    """Write the task's files into `folder`, and agent.files into `files`.

    Raises ConfigError if agent.files names a file outside of the folder.
    """
    _write(folder / PROMPT_FILE, prompt)
    _write(folder / TASK_FILE, task)
    for name, text in config.files.items():
        path = (files / name).resolve()
        if not path.is_relative_to(files.resolve()):
            raise ConfigError(f"agent.files names {name!r}, outside of the program's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, filled_in(text, values))


def program_variables(
    config: ProgramAgentConfig, address: Address, values: Mapping[str, str], *, home: str
) -> dict[str, str]:
    """Return the environment variables that a program gets wherever it runs."""
    no_proxy = _joined(os.environ.get("no_proxy", ""), "127.0.0.1", separator=",")
    given = given_variables(config.variables, VARIABLES)
    return {
        "HOME": home,
        "PWD": home,
        "OPENENV_TASK_FILE": values["{task_file}"],
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # equal runs, equal orders of sets
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
        **address.variables(),
        **{name: filled_in(value, values) for name, value in given.items()},
    }


def output_file(folder: Path) -> Path:
    """Return the file beside the folder that gets the program's output."""
    return folder.with_suffix(".log")


def results_folder(folder: Path) -> Path:
    """Return the folder beside the program's own for what is read when the program has ended."""
    return folder.with_suffix(".results")


def take_output(folder: Path, secret: str) -> str:
    """Return the output of a program that has ended, cut and fit to be shown, and remove its file.

    secret: the key of the episode, which is new each time.
    """
    path = output_file(folder)
    with suppress(OSError):
        with path.open("rb") as file:
            data = file.read(KEPT_BYTES // 2)
            num_more = max(0, path.stat().st_size - KEPT_BYTES)
            file.seek(num_more, os.SEEK_CUR)
            last = file.read(KEPT_BYTES // 2)
        path.unlink()
        note = f"\n[{num_more} bytes left out]\n".encode() if num_more else b""
        text = (data + note + last).decode(errors="replace")
        return visible(text.replace(secret, "<hidden: OPENAI_API_KEY>"))
    return ""


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="replace"))


def _joined(*parts: str, separator: str = os.pathsep) -> str:
    return separator.join(filter(None, parts))
