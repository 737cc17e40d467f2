"""Read the small files of a model's folder within limits: configurations, headers of weights.

The folder may be untrusted, and transformers reads whatever its files contain.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.models.chat.limited_program import LimitedProgramError, output_of
from openenv_pipe.system.budgets import JsonBudget
from openenv_pipe.system.files import parse_json, stamp_of

TOKENIZER = "tokenizer.json"
TEXTS = (".json", ".jinja", ".txt", ".model")
# tokenizer.json of the largest vocabularies, of 260,000 tokens, has 35 MB and 2 million values, and
# takes 3 s and 500 MB to be decoded.
BUDGET = JsonBudget(max_mb=64, max_values=4_000_000)
PAGE_CPU_S = 8  # before a page leaves out the texts of tokens
CHECK_CPU_S = 60  # before a model is rejected
MEMORY_MB = 1024


def check_model_folder(folder: Path) -> None:
    """Check a model's configurations and its tokenizer before they are read.

    Raises:
        ConfigError: see `check_model_file`.
        OSError: the folder cannot be read.
    """
    for file in sorted(path for path in folder.iterdir() if path.suffix in TEXTS):
        check_model_file(file)


def check_model_file(file: Path) -> None:
    """Check the size of a configuration or a vocabulary, and whether it can be read.

    Raises ConfigError: it is not a file, is too large, or makes its reader fail.
    """
    _reject_other_kinds(file)
    _check_once(file, stamp_of(file))


@lru_cache(maxsize=64)
def _check_once(file: Path, _stamp: tuple[int, int, int]) -> None:
    content = read_model_file(file)
    if file.name == TOKENIZER:
        token_texts(file, content, CHECK_CPU_S)
    elif file.suffix == ".json":
        try:
            parse_json(file, content, BUDGET)
        except RunFolderError as error:
            raise ConfigError(str(error)) from error


def read_model_file(file: Path) -> bytes:
    """Read a model's configuration or vocabulary, also through a link. Raises ConfigError."""
    _reject_other_kinds(file)
    if (size := file.stat().st_size) > BUDGET.max_mb * 2**20:
        raise ConfigError(
            f"{file} has {size / 2**20:,.0f} MB; expected at most {BUDGET.max_mb} MB of a "
            "model's configuration or vocabulary"
        )
    return file.read_bytes()


def _reject_other_kinds(file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"{file} is not a file, but a folder, a pipe or the like")


def token_texts(file: Path, content: bytes, cpu_s: int = PAGE_CPU_S) -> Mapping[int, str]:
    """Return the text of each token of a vocabulary.

    file: where the content of a tokenizer.json is from, for errors. cpu_s: the limit.

    Raises ConfigError: it is damaged, or takes more time or memory than any tokenizer needs.
    """
    try:
        output = output_of("tokenizer", content, cpu_s=cpu_s, memory_mb=MEMORY_MB)
    except LimitedProgramError as error:
        raise ConfigError(f"the tokenizer {file} cannot be used: {error}") from None
    return {int(number): text for number, text in json.loads(output).items()}


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the length of a safetensors file's header, with the length field, and its content.

    Raises:
        ConfigError: the file is not a safetensors file, or has been cut off.
        OSError: it cannot be read.
    """
    _reject_other_kinds(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > BUDGET.max_mb * 2**20:
            raise ConfigError(
                f"{path} is not a safetensors file: it begins with the length of its header, "
                f"{length:,} bytes; expected at most {BUDGET.max_mb} MB"
            )
        content = file.read(length)
    try:
        header = parse_json(path, content, BUDGET)
    except RunFolderError as error:
        raise ConfigError(f"the header of a safetensors file is damaged: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is not a safetensors file: its header is {header!r:.80}")
    _reject_cut_off(path, 8 + length, header)
    return 8 + length, header


def _reject_cut_off(path: Path, length: int, header: Mapping[str, Any]) -> None:
    """Raise ConfigError if a safetensors file ends before its weights do."""
    try:
        ends = [
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        ]
        expected = length + max(ends, default=0)
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: its header has {error}") from error
    if (size := path.stat().st_size) < expected:
        raise ConfigError(
            f"{path} has {size:,} bytes; expected the {expected:,} of its header: it has been cut "
            "off, as by an interrupted copy; copy or download it again"
        )
