"""Read a growing metrics.jsonl again and again; only what is new is parsed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.metrics import parse_record
from openenv_pipe.system.files import open_file

MAX_BYTES = 512 * 2**20  # of one file; a step's line has about 2 KB

MAX_EPOCH = 2**50  # JavaScript's numbers are exact up to 2**53

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsRead:
    """What a file has at one time."""

    epoch: int  # another number when the file is replaced, as a resume does
    records: Sequence[Record]
    names: Sequence[str]  # of all metrics, sorted


class MetricsReader:
    """The records of one file that grows, or is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._inode: int | None = None
        self._offset = 0
        self._number = 0
        self._records: Sequence[Record] = []
        self._names: Sequence[str] = []
        self.num_damaged = 0

    def read(self) -> MetricsRead:
        """Read what is new, and return all."""
        with self._lock:
            try:
                with open_file(self._path) as file:
                    self._read(file)
            except (RunFolderError, OSError):
                self._restart(None)
            epoch = (self._inode or 0) % MAX_EPOCH
            return MetricsRead(epoch=epoch, records=self._records, names=self._names)

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
        names = {name for record in records for name in record} - {"step", "stage"}
        if not names <= {*self._names}:
            self._names = sorted(names | {*self._names})

    def _restart(self, inode: int | None) -> None:
        self._inode, self._offset, self._number = inode, 0, 0
        self._records, self._names, self.num_damaged = [], [], 0
