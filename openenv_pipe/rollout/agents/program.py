"""The process of a program: its folder, its environment variables, its output."""

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.config.schema import ProgramAgentConfig
from openenv_pipe.environments.hosts.process import absolute_part, filled_in
from openenv_pipe.errors import ConfigError
from openenv_pipe.rollout.agents.calls import MODEL
from openenv_pipe.system.foreign_text import visible
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.secrets import without_credentials

GRACE_S = 2.0  # between SIGTERM and SIGKILL
KEPT_BYTES = 8000  # of the output, one half from its beginning and one from its end
PYTHON = "{python}"


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


def command_problem(config: ProgramAgentConfig) -> str | None:
    """Return why the program cannot be started; None: it is there."""
    program = config.command[0]
    path = absolute_part(program, Path.cwd())
    if program == PYTHON or shutil.which(path, path=config.variables.get("PATH")):
        return None
    return f"agent.command starts with {program!r}, which is not a program here or on PATH"


def start_program(
    config: ProgramAgentConfig, address: Address, *, folder: Path, prompt: str, task: str
) -> ManagedProcess:
    """Start the program of one episode.

    Args:
        folder: its current folder and home, which is removed when it ends.
        task: JSON, for programs that want more than the prompt.

    Raises:
        ConfigError: agent.files names a file outside of the folder.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True)
    files = {"prompt_file": folder / "prompt.txt", "task_file": folder / "task.json"}
    values = {
        PYTHON: sys.executable,
        "{prompt_file}": str(files["prompt_file"]),
        "{task_file}": str(files["task_file"]),
        "{base_url}": f"{address.url}/v1",
        "{api_key}": address.key,
        "{model}": MODEL,
        "{env_url}": address.env_url,
        "{prompt}": prompt.replace("\0", ""),  # An argument cannot hold one; the last to fill in.
    }
    _write(files["prompt_file"], prompt)
    _write(files["task_file"], task)
    for name, text in config.files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ConfigError(f"agent.files names {name!r}, outside of the program's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, filled_in(text, values))
    return ManagedProcess(
        [filled_in(absolute_part(part, Path.cwd()), values) for part in config.command],
        log=output_file(folder),
        environment=_environment(config.variables, address, files["task_file"], values),
        cwd=folder,
        grace_s=GRACE_S,
        scratch=folder,
    )


def output_file(folder: Path) -> Path:
    """Return the file beside the folder that gets the program's output."""
    return folder.with_suffix(".log")


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


def _environment(
    variables: Mapping[str, str], address: Address, task_file: Path, values: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of this process without credentials, and those of the program."""
    folder = str(task_file.parent)
    home = {"HOME": folder, "PWD": folder, "OPENENV_TASK_FILE": str(task_file)}
    # XDG_CONFIG_HOME and the like would lead a program out of its home, to your own agent's files.
    inherited = {name: os.environ[name] for name in os.environ if not name.startswith("XDG_")}
    python = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}  # equal runs, equal orders of sets
    paths = _joined(os.environ.get("PYTHONPATH", ""), str(Path.cwd()))
    no_proxy = _joined(os.environ.get("no_proxy", ""), "127.0.0.1", separator=",")
    return {
        **without_credentials(inherited),
        **home,
        **python,
        "PYTHONPATH": paths,
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
        **address.variables(),
        **{name: filled_in(value, values) for name, value in variables.items()},
    }


def _joined(*parts: str, separator: str = os.pathsep) -> str:
    return separator.join(filter(None, parts))
