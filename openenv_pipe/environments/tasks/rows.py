"""Read rows of files as reset keywords before anything starts; `data_sets` reads data sets.

No value changes on its way: JSON keeps its types, and a CSV column is numbers or booleans only if
every cell prints back as it was read. What cannot be sent to an environment is an error here.
"""

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from openenv_pipe.config.schema import TaskDataset, TaskFile, TaskFolders
from openenv_pipe.environments.client.protocol import request_frame
from openenv_pipe.environments.tasks.sets import Labels
from openenv_pipe.errors import ConfigError, StepRejectedError
from openenv_pipe.system.resources import did_you_mean

Row = Mapping[str, Any]


class Rows(NamedTuple):
    """The reset keywords of each task, and its labels; no labels: no task has any."""

    resets: Sequence[Row]
    labels: Sequence[Labels] = ()


MAX_EXACT = 2**53  # Every reader of JSON holds whole numbers up to this exactly.
BOOLEANS = {"true": True, "false": False}


def read_file(config: TaskFile, key: str) -> Rows:
    """Read all rows of a JSONL or CSV file.

    Raises ConfigError: The file cannot be read, or a row cannot be sent; the message names the
    block's `key`, the line and the column.
    """
    path = Path(config.path).expanduser()
    read = _csv_rows if path.suffix.lower() == ".csv" else json_rows
    try:
        rows, labels = [], []
        for number, row in read(read_text(path), config.columns):
            where = f"{key}: {path}, line {number}"
            labels.append(row_labels(row, config.labels, where, key))
            rows.append(_chosen(row, config, where, key))
            require_values(rows[-1], config, row, where, key)
            require_sendable(rows[-1], where, key)
        return Rows(rows, labels)
    except FileNotFoundError as error:
        raise ConfigError(f"{key}.path={config.path!r}: {no_file_text(path)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}.path={config.path!r}: {error}") from error


def no_file_text(path: Path) -> str:
    """Say where a file was looked for, and which one there has the most similar name."""
    folder = path.parent.resolve()
    if not folder.is_dir():
        return f"there is no folder {folder}; name a file relative to {Path.cwd()}"
    names = sorted(each.name for each in folder.iterdir() if each.is_file())
    near = did_you_mean(path.name, names)
    return f"there is no file {path.name} in {folder}{near}; name one that is there"


def read_text(path: Path) -> str:
    """Return a file's text, which is UTF-8, without its byte order mark.

    Raises OSError and ValueError.
    """
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise ValueError(
            f"line {number} is not UTF-8 (byte {content[error.start]:#04x}); save the file as "
            "UTF-8, as JSON lines or .csv (env.tasks of type dataset reads other formats)"
        ) from error


def json_rows(text: str, columns: Mapping[str, str] | None = None) -> Iterator[tuple[int, Row]]:
    decode = json.JSONDecoder(
        object_pairs_hook=_object, parse_float=_float, parse_constant=_reject_constant
    ).decode
    for number, line in enumerate(io.StringIO(text, newline=""), start=1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"line {number} is not JSON: {error}; expected one JSON object a line"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is {line.strip()[:60]}, expected a JSON object")
        yield number, row


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its members. Raises ValueError if two have the same name."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice in one object; remove one")
    return members


def _float(literal: str) -> float:
    """Read a number that is not whole. Raises ValueError if a float cannot hold its digits."""
    value = float(literal)
    with suppress(InvalidOperation):  # of an exponent that is absurdly large
        # Writers print floats with the fewest digits, with 17 digits, or with all of them.
        printed = (Decimal(repr(value)), Decimal(f"{value:.17g}"), Decimal(value))
        if math.isfinite(value) and Decimal(literal) in printed:
            return value
    raise ValueError(
        f"{literal} would become {value!r} in floating point; write it as text, in quotes"
    )


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON, and cannot be sent; write null or a string")


def _csv_rows(text: str, columns: Mapping[str, str] | None) -> Iterator[tuple[int, Row]]:
    """Yield rows, with the line on which each ends."""
    csv.field_size_limit(sys.maxsize)  # A prompt may be longer than the default of 128 KiB.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        check_header(header, columns)
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} is not CSV: {error}") from error
    for number, row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"line {number}: the number of cells is {len(row)}, expected {len(header)} as in "
                "the header; put cells that contain commas in double quotes"
            )
    typed = [read_column(cells) for cells in zip(*(row for _, row in rows), strict=True)]
    for (number, _), values in zip(rows, zip(*typed, strict=True), strict=True):
        yield number, dict(zip(header, values, strict=True))


def read_column(cells: Sequence[str]) -> Sequence[Any]:
    """Return the values of a CSV column.

    They are numbers or booleans if every cell prints back as it was read, such as `7`, `2.5` and
    `true`. Otherwise all of them are text: one `1.10`, `007` or empty cell decides for its column.
    """
    if all(cell in BOOLEANS for cell in cells):
        return [BOOLEANS[cell] for cell in cells]
    numbers = [_number(cell) for cell in cells]
    return cells if None in numbers else numbers


def _number(cell: str) -> int | float | None:
    """Return the number that prints as the cell; None if there is none."""
    with suppress(ValueError):
        if str(whole := int(cell)) == cell and abs(whole) <= MAX_EXACT:
            return whole
    with suppress(ValueError):
        if repr(number := float(cell)) == cell and math.isfinite(number):
            return number
    return None


def check_header(header: Sequence[str], columns: Mapping[str, str] | None) -> None:
    """Raise ValueError for column names that two columns have, or that no reset keyword can have.

    An environment silently drops keywords that it does not know.
    """
    for name in header:
        if header.count(name) > 1:
            raise ValueError(f"line 1 names the column {name!r} twice; rename one of them")
        if columns is None and (not name or name != name.strip()):
            raise ValueError(
                f"line 1 names a column {name!r}, expected a name without spaces around it; rename "
                "it, or choose columns by `columns`"
            )
    if len(header) == 1 and (other := next((sign for sign in ";\t" if sign in header[0]), None)):
        raise ValueError(f"line 1 is separated by {other!r}, expected commas: {header[0][:60]!r}")


def _chosen(row: Row, config: TaskFile, where: str, key: str) -> Row:
    columns = config.columns
    if columns is None:
        return {name: value for name, value in row.items() if name not in config.labels}
    check_columns(columns, [*row], where, key)
    return {keyword: row[column] for column, keyword in columns.items()}


def check_columns(columns: Mapping[str, str], names: Sequence[str], where: str, key: str) -> None:
    """Raise ConfigError for a column that is not there, or two that become one reset keyword.

    names: the columns that are there.
    """
    missing = [column for column in columns if column not in names]
    twice = [
        column for column, keyword in columns.items() if [*columns.values()].count(keyword) > 1
    ]
    problems = []
    if missing:
        there = ", ".join(names) or "nothing"
        problems.append(f"{where} has no column {missing[0]!r}; it has {there}")
    if twice:
        keyword = columns[twice[0]]
        of_it = [column for column in twice if columns[column] == keyword]
        problems.append(
            f"{key}.columns maps {' and '.join(of_it)} to the reset keyword {keyword!r}; name "
            "another one. An override of columns is merged with the file's, from which "
            f"'~{key}.columns.{of_it[0]}' takes a column away"
        )
    if problems:
        raise ConfigError("; ".join(problems))


def row_labels(row: Row, columns: Sequence[str], where: str, key: str) -> Labels:
    """Return a row's labels as text, without those that are null or empty.

    Raises ConfigError for a column that is not there, or whose value is a list or an object.
    """
    found = {}
    for column in columns:
        if column not in row:
            raise ConfigError(
                f"{where} has no {column!r}, which {key}.labels names; it has "
                f"{', '.join(row) or 'nothing'}"
            )
        value = row[column]
        if not isinstance(value, str | int | float | None):
            raise ConfigError(
                f"{where}: {column!r} is {value!r:.80}, and {key}.labels expects text, a number, "
                "true or false; name another column"
            )
        if value not in (None, ""):
            found[column] = value if isinstance(value, str) else json.dumps(value)
    return found


def require_values(
    row: Row, config: TaskFile | TaskDataset, read: Row, where: str, key: str
) -> None:
    """Raise ConfigError for a reset keyword without a value.

    read: the row under the names of its columns.
    """
    for keyword in config.required:
        if keyword not in row:
            columns = {**(config.columns or {}), keyword if keyword in read else "COLUMN": keyword}
            shown = f"{{{', '.join(f'{name}: {own}' for name, own in columns.items())}}}"
            advice = f"{key}.columns={shown} names the column"
            if config.columns:
                advice = f"{key}.columns passes on only what it lists; set it to {shown}"
            raise ConfigError(
                f"{where} gives no {keyword!r}, which {key}.required asks for; its columns are "
                f"{', '.join(read) or 'none'}; {advice}"
            )
        value = row[keyword]
        if value is None or value in ([], {}) or (isinstance(value, str) and not value.strip()):
            raise ConfigError(
                f"{where}: {keyword!r} is {value!r}, and {key}.required asks for a value; fill it "
                "in, or remove the row"
            )


def require_sendable(row: Row, where: str, key: str) -> None:
    """Raise ConfigError for a value that no message to an environment can carry.

    Examples: half of a surrogate pair, a date, lists that nest too deep. key: of the task set.
    """
    try:
        request_frame("reset", row, sys.maxsize)
    except StepRejectedError:
        for name, value in row.items():
            try:
                request_frame("reset", {name: value}, sys.maxsize)
            except StepRejectedError as error:
                raise ConfigError(
                    f"{where}, column {name!r}: {value!r:.80} cannot be sent to an environment: "
                    f"{str(error).partition('not sent: ')[2]}; change it, or choose other columns "
                    f"by {key}.columns"
                ) from error


def read_folders(config: TaskFolders, key: str) -> list[Row]:
    """List the sub-folders by name, each with its path from the current folder.

    Raises ConfigError: The folder cannot be read, or has no task.
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
    for task in tasks:
        require_sendable(task, key, key)  # A name that is not UTF-8 cannot be sent.
    return tasks
