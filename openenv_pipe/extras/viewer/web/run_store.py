"""The run folders below one folder, found by keys such as `wordle/0007`, and cached.

A key is a path of two names in the folder of runs. Nothing else is reachable.
"""

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.episodes.index import EpisodeIndex
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import read_during, read_reports
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import Records, complete_lines
from openenv_pipe.system.budgets import BudgetError
from openenv_pipe.system.files import open_file, read_json, stamp_of

MAX_EPOCH = 2**50  # JavaScript's numbers are exact up to 2**53
Record = dict[str, Any]
NAME = re.compile(r"[\w.@+-]+")
MAX_KEPT = 16  # indexes of episodes that stay open
Kept = TypeVar("Kept")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsRead:
    epoch: int  # another number when the file is replaced, as a resume does
    records: Sequence[Record]
    names: Sequence[str]  # of all metrics, sorted
    problem: str | None  # why records are missing


class MetricsReader:
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


class RunStore:
    """The runs of one folder. Its methods may be called from any thread."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self._lock = Lock()
        self._metrics: dict[Path, MetricsReader] = {}
        self._indexes: OrderedDict[Path, EpisodeIndex] = OrderedDict()
        self._openings: dict[Path, Lock] = {}
        self._files: dict[tuple[str, Path], tuple[object, Any]] = {}

    def all_keys(self) -> list[str]:
        """Return the keys of all run folders, by name and number."""
        found = [
            path for path in self.runs_dir.glob("*/*") if path.name.isdecimal() and path.is_dir()
        ]
        found.sort(key=lambda path: (path.parent.name, int(path.name)))
        return [f"{path.parent.name}/{path.name}" for path in found]

    def path(self, key: str) -> Path:
        parts = key.split("/")
        if len(parts) != 2 or not all(
            NAME.fullmatch(each) and set(each) != {"."} for each in parts
        ):
            raise RunFolderError(f"{key!r:.80} is not a run; expected one such as wordle/0007")
        path = self.runs_dir / key
        if not (path / "run.json").is_file():
            raise RunFolderError(f"there is no run {key!r:.80} in {self.runs_dir}")
        return path

    def folder(self, key: str) -> RunFolder:
        return RunFolder.open(self.path(key))

    def metrics(self, key: str) -> MetricsRead:
        """Return all of metrics.jsonl; only lines added since the last call are read."""
        path = self.path(key) / "metrics.jsonl"
        with self._lock:
            reader = self._metrics.setdefault(path, MetricsReader(path))
        return reader.read()

    def config(self, key: str) -> dict[str, Any]:
        """Return the configuration as it was written, without secrets; {} if it is damaged."""
        path = self.path(key) / "config.json"

        def read() -> dict[str, Any]:
            try:
                found = read_json(path)
            except RunFolderError:
                return {}
            return found if isinstance(found, dict) else {}

        return self._kept("config", path, read)

    def reports(self, key: str) -> dict[str, EvalReport]:
        folder = self.path(key)
        return self._kept("reports", folder / "eval", lambda: read_reports(folder))

    def during(self, key: str) -> list[EvalReport]:
        folder = self.path(key)
        return self._kept("during", folder / "eval", lambda: read_during(folder))

    def index(self, key: str) -> EpisodeIndex:
        folder = self.path(key)
        with self._lock:
            opening = self._openings.setdefault(folder, Lock())
        with opening:  # Only one thread reads all episodes of a run that has no index yet.
            with self._lock:
                index = self._indexes.pop(folder, None)
            if index is None:
                index = EpisodeIndex.opened(folder)
            else:
                index.refresh()
            # An index that is dropped here closes itself when its last query has ended.
            with self._lock:
                self._indexes[folder] = index
                while len(self._indexes) > MAX_KEPT:
                    self._indexes.popitem(last=False)
        return index

    def _kept(self, what: str, path: Path, read: Callable[[], Kept]) -> Kept:
        """Return what was read last if the file or folder has not changed since."""
        try:
            stamp: object = stamp_of(path)
        except OSError:
            stamp = None
        with self._lock:
            kept = self._files.get((what, path))
        if kept is not None and kept[0] == stamp:
            return kept[1]
        value = read()
        with self._lock:
            self._files[what, path] = (stamp, value)
        return value
