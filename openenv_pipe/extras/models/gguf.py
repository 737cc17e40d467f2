"""Make folders that transformers reads from GGUF files, the format of llama.cpp.

A folder is made once, in this user's cache. Weights are dequantized and stored in float32.
"""

import asyncio
import io
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stderr
from functools import lru_cache
from pathlib import Path
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.hub import Notify
from openenv_pipe.system.file_lock import try_lock
from openenv_pipe.system.files import cache_folder, digest_of_file, new_folder
from openenv_pipe.system.out_of_memory import as_out_of_memory

SUFFIX = ".gguf"
LOCK_POLL_S = 0.5


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
                notify(f"another process makes {folder}; waiting for it")
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
    # What it was read from; with these, transformers would save quantized weights.
    del model.config.quantization_config
    model.hf_quantizer = None
    return model, tokenizer


def folder_of(file: Path) -> Path:
    """Return where the folder of a GGUF file is, by its content. Raises ConfigError."""
    if not file.is_file():
        raise ConfigError(
            f"model.path={str(file)!r} is not a file; expected a GGUF file, a folder with "
            "config.json and safetensors weights, or an id on a model hub"
        )
    found = file.stat()
    digest = _digest(file.resolve(), (found.st_mtime_ns, found.st_size, found.st_ino))
    return models_folder() / f"{file.stem}-{digest[:16]}"


@lru_cache(maxsize=8)
def _digest(file: Path, _stamp: tuple[int, int, int]) -> str:
    return digest_of_file(file)
