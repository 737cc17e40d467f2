"""What a program is started with: its command, its environment variables, its files."""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.environments.hosts.process import absolute_part, filled_in
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.calls import MODEL
from openenv_pipe.extras.agents.schema import ProgramAgentConfig
from openenv_pipe.rollout.sandbox import Program, ProgramPaths, ProgramStartError
from openenv_pipe.system.child_environment import given_variables
from openenv_pipe.system.resources import did_you_mean
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


def check_program(config: ProgramAgentConfig) -> str:
    """Describe in a line what is started. Raises ConfigError."""
    program = config.command[0]
    path = absolute_part(program, Path.cwd())
    if program == PYTHON or shutil.which(path, path=config.variables.get("PATH")):
        _require_script(config)
        return f"a program, {' '.join(config.command[:2])}"
    problem = f"agent.command starts with {program!r}, which is not a program here or on PATH"
    if config.reward_from == "harbor":
        problem += "; install Harbor with: uv tool install harbor"
    raise ConfigError(problem)


def _require_script(config: ProgramAgentConfig) -> None:
    """Raise ConfigError if the program is Python with a script that does not exist."""
    program, script = (*config.command, "")[:2]
    is_script = "python" in program and script.endswith(".py") and "{" not in script
    if not is_script or Path(script).is_file() or script in config.files:
        return
    here = Path.cwd()
    near = did_you_mean(Path(script).name, sorted(each.name for each in here.glob("*.py")))
    raise ConfigError(
        f"agent.command names the script {script!r} after {program}, and there is no such "
        f"file in the current folder {here}{near}; give its path from there, or an absolute one"
    )


def make_program(
    config: ProgramAgentConfig,
    address: Address,
    paths: ProgramPaths,
    *,
    folder: Path,
    prompt: str,
    task: str,
) -> Program:
    """Return the program of one episode, with its placeholders filled in.

    paths: where the program finds its files in the sandbox.
    folder: does not exist yet, and is the program's own.
    task: JSON, for programs that want more than the prompt.

    Raises ProgramStartError and ConfigError.
    """
    values, command = placeholders(address, paths, prompt), config.command
    if config.sandbox.is_this_machine:
        here = {"{start_folder}": str(Path.cwd()), "{results}": str(results_folder(folder))}
        values, command = here | values, [absolute_part(part, Path.cwd()) for part in command]
    for name in config.files:
        if not Path(os.path.normpath(Path(paths.home, name))).is_relative_to(paths.home):
            raise ConfigError(f"agent.files names {name!r}, outside of the program's folder")
    return Program(
        folder=folder,
        output=folder.with_suffix(".log"),
        command=command_line(command, values),
        variables=program_variables(config, address, values, home=paths.home),
        task_files={PROMPT_FILE: prompt, TASK_FILE: task},
        files={name: filled_in(text, values) for name, text in config.files.items()},
        grace_s=config.grace_s,
    )


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


def placeholders(address: Address, paths: ProgramPaths, prompt: str) -> dict[str, str]:
    return {
        PYTHON: paths.python,
        "{prompt_file}": f"{paths.task_folder}/{PROMPT_FILE}",
        "{task_file}": f"{paths.task_folder}/{TASK_FILE}",
        "{base_url}": f"{address.url}/v1",
        "{api_key}": address.key,
        "{model}": MODEL,
        "{env_url}": address.env_url,
        "{prompt}": as_argument(prompt),  # the last to fill in
    }


def as_argument(text: str) -> str:
    """Return a text as an argument can hold it: without NUL bytes and lone surrogates."""
    return text.replace("\0", "").encode(errors="replace").decode()


def program_variables(
    config: ProgramAgentConfig, address: Address, values: Mapping[str, str], *, home: str
) -> dict[str, str]:
    """Return the environment variables that a program gets wherever it runs."""
    no_proxy = ",".join(filter(None, (os.environ.get("no_proxy", ""), "127.0.0.1")))
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


def results_folder(folder: Path) -> Path:
    """Return the folder, beside the program's own, that is read when the program has ended."""
    return folder.with_suffix(".results")


def take_output(path: Path, secret: str) -> str:
    """Return the output of a program that has ended, cut and fit to be shown, and remove its file.

    secret: the key of the episode, which is new each time.
    """
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
