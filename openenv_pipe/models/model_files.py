"""Read the small files of a model's folder within limits: configurations, headers of weights.

The folder may be anybody's. transformers reads whatever its files have.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.models.chat.tokenizer_process import check_tokenizer
from openenv_pipe.system.budgets import JsonBudget
from openenv_pipe.system.files import parse_json

TOKENIZER = "tokenizer.json"
TEXTS = (".json", ".jinja", ".txt", ".model")
# tokenizer.json of the largest vocabularies has 35 MB and 2 million values.
BUDGET = JsonBudget(max_mb=64, max_values=4_000_000)


def check_model_folder(folder: Path) -> None:
    """Check the sizes of a model's configurations, and its tokenizer, before they are read.

    Raises:
        ConfigError: One of them is no file, is too large, or makes its reader fail.
        OSError: The folder cannot be read.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in TEXTS)
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} is not a file, but a folder, a pipe or the like")
    _check_once(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=8)
def _check_once(files: tuple[tuple[Path, int, int], ...]) -> None:
    for file, _, size in files:
        if size > BUDGET.max_mb * 2**20:
            raise ConfigError(
                f"{file} has {size / 2**20:,.0f} MB; expected at most {BUDGET.max_mb} MB of a "
                "model's configuration or vocabulary"
            )
        if file.name == TOKENIZER:
            check_tokenizer(file)
        elif file.suffix == ".json":
            try:
                parse_json(file, file.read_bytes(), BUDGET)
            except RunFolderError as error:
                raise ConfigError(str(error)) from error


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the length of a safetensors file's header with its own, and what it says.

    Raises:
        ConfigError: The file is none of safetensors.
        OSError: It cannot be read.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file, but a folder, a pipe or the like")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > BUDGET.max_mb * 2**20:
            raise ConfigError(
                f"{path} is no safetensors file: it begins with the length of its header, "
                f"{length:,} bytes; expected at most {BUDGET.max_mb} MB"
            )
        content = file.read(length)
    try:
        header = parse_json(path, content, BUDGET)
    except RunFolderError as error:
        raise ConfigError(f"the header of a safetensors file is damaged: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is no safetensors file: its header is {header!r:.80}")
    return 8 + length, header
