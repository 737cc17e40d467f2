"""Files of gzipped lines, which are read one line at a time and within budgets."""

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from openenv_pipe.errors import RunFolderError
from openenv_pipe.system.budgets import (
    EPISODE,
    FREE_UNPACKED_MB,
    MAX_PACKING_RATIO,
    MAX_ROWS,
    MAX_UNPACKED_MB,
    too_large,
)
from openenv_pipe.system.files import open_file, write_bytes

GZIP = 31  # zlib's code for a gzip container without name and time
FASTEST = 1  # Halves the size; level 6 takes five times as long to save another tenth.
READ_BYTES = 2**16
UNPACKED_BYTES = 2**20


def write_packed(path: Path, text: str) -> None:
    write_bytes(path, zlib.compress(text.encode(), FASTEST, GZIP))


def read_packed(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers from 1 on and the contents of a file's lines.

    Raises RunFolderError: The file is missing or damaged, or unpacks to more than is read.
    """
    with open_file(path) as file:
        try:
            for number, line in enumerate(_lines(path, _unpacked(path, file)), 1):
                if number > MAX_ROWS or not line:
                    what = f"more than {MAX_ROWS:,} lines" if line else f"nothing in line {number}"
                    raise RunFolderError(f"{path} has {what}; expected a record in each line")
                yield number, line
        except (zlib.error, OSError) as error:
            raise RunFolderError(f"cannot read {path}: {error}") from error


def _lines(path: Path, contents: Iterable[bytes]) -> Iterator[bytes]:
    beginning: list[bytes] = []  # of a line that continues in the next content
    num_bytes = 0
    for content in contents:
        first, *others = content.split(b"\n")
        beginning.append(first)
        num_bytes += len(first)
        if num_bytes > EPISODE.max_mb * 2**20:
            raise too_large(path, EPISODE.max_mb, "has a line of more than")
        if others:
            yield b"".join(beginning)
            yield from others[:-1]
            beginning, num_bytes = [others[-1]], len(others[-1])
    if last := b"".join(beginning):
        yield last


def _unpacked(path: Path, file: BinaryIO) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(GZIP)
    num_read = num_unpacked = 0
    while not unpacker.eof:
        packed = file.read(READ_BYTES)
        if not packed:
            raise zlib.error("it ends too early")
        num_read += len(packed)
        while packed and not unpacker.eof:
            content = unpacker.decompress(packed, UNPACKED_BYTES)
            packed = unpacker.unconsumed_tail
            num_unpacked += len(content)
            if num_unpacked > MAX_UNPACKED_MB * 2**20:
                raise too_large(path, MAX_UNPACKED_MB, "unpacks to more than")
            if num_unpacked > max(FREE_UNPACKED_MB * 2**20, num_read * MAX_PACKING_RATIO):
                raise too_large(
                    path,
                    num_unpacked // 2**20,
                    f"unpacks to more than {MAX_PACKING_RATIO} times its size:",
                )
            yield content
    if unpacker.unused_data or file.read(1):
        raise zlib.error("something follows its end")
