"""metrics.jsonl: one line per step, appended and never rewritten.

Equal runs have equal lines without the `time/` keys (`without_times`). JSON has no NaN, so values
that are not finite are written as null.
"""

import json
import math
import numbers
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from openenv_pipe.errors import RunFolderError
from openenv_pipe.system.budgets import (
    MAX_METRIC_NAMES,
    METRICS,
    METRICS_LINE,
    Account,
    BudgetError,
    JsonBudget,
    too_large,
)
from openenv_pipe.system.files import naming, open_file, parse_json

Metric = float | int | str
MAX_STEP = 10**9
ENVIRONMENT = "environment"  # prefix of the metrics of one of several environments
MEMORY = "time/memory_gib"  # of all processes of the run
FIRST_KEYS = ("step", "stage")


class MetricsFile:
    """The append-only writer of one run. On opening, it removes a line that a kill cut off."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Metric]) -> dict[str, Metric | None]:
        """Write and sync one line: step and stage first, the other keys sorted.

        So no checkpoint is saved before the lines of its steps. Returns the record as it is read.
        """
        first = [key for key in FIRST_KEYS if key in record]
        others = sorted(key for key in record if key not in FIRST_KEYS)
        values = {key: _as_json(record[key]) for key in [*first, *others]}
        with naming(Path(self._file.name)):
            self._file.write(_dump(values) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        return values

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path, budget: JsonBudget | None = METRICS) -> list[dict[str, Any]]:
    """Read the records of a file, [] if it is missing. An unfinished last line is ignored.

    budget: of all records; None: no limit, for this process's own run.

    Raises RunFolderError: A complete line is not a record, or there are too many.
    """
    collected = Records(path, budget)
    for number, line in read_lines(path):
        collected.add(number, line)
    return collected.records


def stage_of(num_steps: int, num_supervised_steps: int) -> tuple[str, int]:
    """Return the main stage of a run, as records name it, and its number of steps.

    num_steps: `trainer.steps`; 0 for a run with only a supervised stage.
    """
    return ("grpo", num_steps) if num_steps else ("warm_start", num_supervised_steps)


class Records:
    """Collects the records of a file within a budget. Equal names are stored once."""

    def __init__(self, path: Path, budget: JsonBudget | None = METRICS) -> None:
        self.records: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        self._path = path
        self._account = None if budget is None else Account(budget)

    def add(self, number: int, line: bytes) -> None:
        """Parse the line of this number. Raises RunFolderError if it is damaged or too large."""
        if self._account is not None:
            self._account.spend(self._path, line)
        record = parse_record(self._path, number, line)
        self.records.append(
            {self.names.setdefault(name, name): value for name, value in record.items()}
        )
        if len(self.names) > MAX_METRIC_NAMES:
            raise BudgetError(
                f"{self._path} has more than {MAX_METRIC_NAMES:,} names of metrics, the most that "
                "are read; is the file damaged?"
            )


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines of a file and their numbers from 1 on; none if it is missing.

    Raises RunFolderError: The file cannot be read, or a line is too long.
    """
    if not path.exists():
        return
    with open_file(path) as file:
        yield from enumerate(complete_lines(path, file), start=1)


def complete_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines of an open file, from its position on.

    Raises RunFolderError: The file cannot be read, or a line is too long.
    """
    max_bytes = METRICS_LINE.max_mb * 2**20
    try:
        while line := file.readline(max_bytes + 1):
            if len(line) > max_bytes:
                raise too_large(path, METRICS_LINE.max_mb, "has a line of more than")
            if line.endswith(b"\n"):
                yield line[:-1]
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error


def parse_record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Parse a line of the file `path`: step, stage and metrics, which are numbers or null.

    Raises RunFolderError: The line is something else.
    """
    where = f"{path}, line {number}"
    record = parse_json(where, line, METRICS_LINE)
    if not isinstance(record, dict):
        raise RunFolderError(f"{where} is not a record of metrics: {record!r:.80}")
    step, stage = record.get("step"), record.get("stage")
    if type(step) is not int or not 0 <= step <= MAX_STEP or not isinstance(stage, str):
        raise RunFolderError(
            f"{where} is not a record of metrics: its step is {step!r:.40}, its stage {stage!r:.40}"
        )
    for key, value in record.items():
        if key != "stage" and not _is_metric(value):
            raise RunFolderError(f"{where}: {key!r:.80} is {value!r:.80}; expected a number")
    return record


def _is_metric(value: Any) -> bool:
    return value is None or (
        isinstance(value, int | float) and -sys.float_info.max <= value <= sys.float_info.max
    )


def without_times(line: str) -> str:
    """Remove the `time/` keys of a line; the rest is equal, byte for byte, for equal runs."""
    record = json.loads(line)
    return _dump({key: value for key, value in record.items() if not key.startswith("time/")})


def _as_json(value: Metric) -> Metric | None:
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


def _dump(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False, separators=(",", ":"))
