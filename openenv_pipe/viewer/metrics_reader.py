"""Read a growing metrics.jsonl again and again; only what is new is parsed."""

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.metrics import parse_record
from openenv_pipe.system.files import open_file

MAX_BYTES = 512 * 2**20  # of one file; a step's line has about 2 KB

MAX_EPOCH = 2**50  # JavaScript's numbers are exact up to 2**53

Record = dict[str, Any]


class MetricsReader:
    """The records of one file, and how often it was replaced, as a resume does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._inode: int | None = None
        self._offset = 0
        self._number = 0
        self._records: list[Record] = []
        self.num_damaged = 0

    def read(self) -> tuple[int, Sequence[Record]]:
        """Return a number that changes when the file is replaced, and the records so far."""
        with self._lock:
            try:
                with open_file(self._path) as file:
                    self._read(file)
            except (RunFolderError, OSError):
                self._restart(None)
            return (self._inode or 0) % MAX_EPOCH, self._records

    def _read(self, file: BinaryIO) -> None:
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._restart(found.st_ino)
        if found.st_size == self._offset:
            return
        file.seek(self._offset)
        content = file.read(MAX_BYTES)
        *lines, unfinished = content.split(b"\n")
        self._offset += len(content) - len(unfinished)
        records = []
        for line in lines:
            self._number += 1
            try:
                records.append(parse_record(self._path, self._number, line))
            except RunFolderError:
                self.num_damaged += 1
        self._records = [*self._records, *records]

    def _restart(self, inode: int | None) -> None:
        self._inode, self._offset, self._number = inode, 0, 0
        self._records, self.num_damaged = [], 0
