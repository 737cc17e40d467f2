"""Read rows of files and data sets as reset keywords, all before anything is started.

A missing column, or a line that is not a JSON object, is an error.
"""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import TaskDataset, TaskFile, TaskFolders
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.extras import how_to_install

Row = Mapping[str, Any]


def read_file(config: TaskFile, key: str) -> list[Row]:
    """Read all rows of a JSONL or CSV file.

    Raises:
        ConfigError: The file cannot be read; the message names the block's `key`.
    """
    path = Path(config.path).expanduser()
    read = _csv_rows if path.suffix.lower() == ".csv" else _json_rows
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            return [
                _chosen(row, config.columns, f"{key}: {path}, {place}")
                for place, row in read(lines)
            ]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{key}.path={config.path!r}: {error}") from error


def _json_rows(lines: Iterator[str]) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is {line.strip()[:60]}, expected a JSON object")
        yield f"line {number}", row


def _csv_rows(lines: Iterator[str]) -> Iterator[tuple[str, Row]]:
    """Yield rows; cells that are a JSON number, true, false or null are converted."""
    for number, row in enumerate(csv.DictReader(lines, strict=True), start=1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} has more or fewer cells than the header")
        yield f"row {number}", {name: _cell(text) for name, text in row.items()}


def _cell(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str | list | dict) else value


def _chosen(row: Row, columns: Mapping[str, str] | None, where: str) -> Row:
    if columns is None:
        return row
    if missing := [column for column in columns if column not in row]:
        raise ConfigError(f"{where} has no {missing[0]!r}; it has {', '.join(row) or 'nothing'}")
    return {keyword: row[column] for column, keyword in columns.items()}


def read_folders(config: TaskFolders, key: str) -> list[Row]:
    """List the sub-folders by name, each with its path from the current folder.

    Raises:
        ConfigError: The folder cannot be read, or has no task.
    """
    folder = Path(config.path).expanduser()
    try:
        found = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise ConfigError(f"{key}.path={config.path!r}: {error}") from error
    tasks: list[Row] = [
        {"path": os.path.relpath(path)}
        for path in found
        if path.name[0] != "." and (config.contains is None or (path / config.contains).is_file())
    ]
    if not tasks:
        what = f" with a file {config.contains}" if config.contains else ""
        raise ConfigError(
            f"{key}.path={config.path!r} has no sub-folder{what}, and so no tasks; name the folder "
            "that the folders of the tasks are in"
        )
    return tasks


def read_dataset(config: TaskDataset, key: str) -> Sequence[Row]:
    """Load the rows of a data set's split.

    Raises:
        ConfigError: `datasets` is not installed, or the data set or a column cannot be read.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{key}.type=dataset needs the package datasets; {how_to_install('datasets')}"
        ) from error
    try:
        rows = datasets.load_dataset(
            config.path,
            config.config,
            split=config.split,
            revision=config.revision,
            data_files=config.data_files,
        )
    except Exception as error:  # `datasets` raises many kinds: no such id, file, split, network
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{key}: cannot load data set {config.path!r}: {first_line}") from error
    if config.columns is None:
        return rows
    for column in config.columns:
        if column not in rows.column_names:
            names = ", ".join(rows.column_names)
            raise ConfigError(f"{key}: {config.path!r} has no column {column!r}; it has {names}")
    return rows.select_columns(list(config.columns)).rename_columns(
        {column: keyword for column, keyword in config.columns.items() if column != keyword}
    )
