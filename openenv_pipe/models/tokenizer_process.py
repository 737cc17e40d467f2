"""Read the tokenizer.json of a model or a run in a process of its own, within limits.

The library that reads it cannot be interrupted, and ends the process where it runs out of memory.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.untrusted_text import visible

PROGRAM = Path(__file__).with_name("decode_vocabulary.py")
# The largest vocabularies, of 260,000 tokens, take 3 s and 500 MB.
PAGE_CPU_S = 8  # before a page does without the texts
CHECK_CPU_S = 60  # before a model is rejected
MEMORY_MB = 1024
OUTPUT_MB = 32
BUSY = 20  # times as long may pass on a machine that is busy with other things
MAX_TOKENIZER_MB = 64  # of the file; the largest have 35
VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
MAX_REASON_LENGTH = 200


def token_texts(file: Path, content: bytes, cpu_s: int = PAGE_CPU_S) -> Mapping[int, str]:
    """Return the text of each token of a vocabulary.

    file: where the content of a tokenizer.json is from, for errors. cpu_s: the limit.

    Raises:
        ConfigError: It is damaged, or takes more time or memory than any tokenizer needs.
    """
    command = [sys.executable, "-I", str(PROGRAM), str(cpu_s), str(MEMORY_MB), str(OUTPUT_MB)]
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    try:
        # One thread, whose CPU time is the process's.
        done = subprocess.run(
            command,
            input=content,
            capture_output=True,
            timeout=cpu_s * BUSY,
            env={**variables, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unusable(file, f"it is not read after {cpu_s * BUSY} s") from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _unusable(file, f"to read it takes more than {cpu_s} s of CPU time")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reasons = [line for line in lines if not line.startswith("note: ")]
        raise _unusable(file, reasons[-1] if reasons else f"exit code {done.returncode}")
    return {int(number): text for number, text in json.loads(done.stdout).items()}


def _unusable(file: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer {file} cannot be used: {visible(reason)[:MAX_REASON_LENGTH]}"
    )


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
