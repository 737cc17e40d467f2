"""Read the tokenizer.json of a model or a run in a process of its own, within limits.

The library that reads it cannot be interrupted, and ends the process where it runs out of memory.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.limited_program import LimitedProgramError, output_of

PROGRAM = "decode_vocabulary.py"
# The largest vocabularies, of 260,000 tokens, take 3 s and 500 MB.
PAGE_CPU_S = 8  # before a page does without the texts
CHECK_CPU_S = 60  # before a model is rejected
MEMORY_MB = 1024
MAX_TOKENIZER_MB = 64  # of the file; the largest have 35


def token_texts(file: Path, content: bytes, cpu_s: int = PAGE_CPU_S) -> Mapping[int, str]:
    """Return the text of each token of a vocabulary.

    file: where the content of a tokenizer.json is from, for errors. cpu_s: the limit.

    Raises:
        ConfigError: It is damaged, or takes more time or memory than any tokenizer needs.
    """
    try:
        output = output_of(PROGRAM, content, cpu_s=cpu_s, memory_mb=MEMORY_MB)
    except LimitedProgramError as error:
        raise _unusable(file, str(error)) from None
    return {int(number): text for number, text in json.loads(output).items()}


def _unusable(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"the tokenizer {file} cannot be used: {reason}")


def check_tokenizer(file: Path) -> None:
    """Check a model's tokenizer.json before it is read in this process.

    Raises:
        ConfigError: As `token_texts`, or the file is too large, or not a file.
    """
    found = file.stat()
    _check_once(file, (found.st_mtime_ns, found.st_size, found.st_ino))


@lru_cache(maxsize=8)
def _check_once(file: Path, _stamp: tuple[int, int, int]) -> None:
    token_texts(file, read_tokenizer(file), CHECK_CPU_S)


def read_tokenizer(file: Path) -> bytes:
    """Read a model's tokenizer.json, also through a link, as those of a hub's cache are.

    Raises:
        ConfigError: It is too large, or not a file.
    """
    if not file.is_file():
        raise _unusable(file, "it is not a file")
    with file.open("rb") as opened:
        content = opened.read(MAX_TOKENIZER_MB * 2**20 + 1)
    if len(content) > MAX_TOKENIZER_MB * 2**20:
        raise _unusable(file, f"it has more than {MAX_TOKENIZER_MB} MB")
    return content
