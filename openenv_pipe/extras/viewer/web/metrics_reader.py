"""Read a growing metrics.jsonl again and again; only what is new is parsed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.metrics import Records, complete_lines
from openenv_pipe.system.budgets import BudgetError
from openenv_pipe.system.files import open_file

MAX_EPOCH = 2**50  # JavaScript's numbers are exact up to 2**53

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsRead:
    epoch: int  # another number when the file is replaced, as a resume does
    records: Sequence[Record]
    names: Sequence[str]  # of all metrics, sorted
    problem: str | None  # why records are missing


class MetricsReader:
    """The records of one file that grows, or is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._problem: str | None
        self._restart(None)

    def read(self) -> MetricsRead:
        """Read what is new, and return all. Lines that are not records are left out."""
        with self._lock:
            try:
                with open_file(self._path) as file:
                    self._read(file)
            except BudgetError as error:
                self._problem = str(error)
                self._is_full = True
            except (RunFolderError, OSError) as error:
                self._restart(None)
                self._problem = str(error) if self._path.exists() else None
            return MetricsRead(
                epoch=(self._inode or 0) % MAX_EPOCH,
                records=[*self._collected.records],
                names=sorted(self._collected.names.keys() - {"step", "stage"}),
                problem=self._problem,
            )

    def _read(self, file: BinaryIO) -> None:
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._restart(found.st_ino)
        if self._is_full:
            return
        file.seek(self._offset)
        for line in complete_lines(self._path, file):
            self._offset += len(line) + 1
            self._number += 1
            try:
                self._collected.add(self._number, line)
            except BudgetError:
                raise
            except RunFolderError as error:
                self._problem = self._problem or str(error)

    def _restart(self, inode: int | None) -> None:
        self._inode, self._offset, self._number = inode, 0, 0
        self._collected = Records(self._path)
        self._problem = None
        self._is_full = False
