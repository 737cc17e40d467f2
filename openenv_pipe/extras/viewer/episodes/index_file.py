"""The SQLite file of the index of episodes, made anew if it is damaged, and the rows in it."""

import json
import logging
import math
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from openenv_pipe.extras.viewer.episodes.query import COLUMNS, storable_text
from openenv_pipe.system.untrusted_text import visible
from openenv_pipe.types import Finish, Status

MAX_WORDS_LENGTH = 100_000  # characters of one episode that a text search covers
MAX_PREVIEW_LENGTH = 160
MAX_ERROR_LENGTH = 300
MAX_NAME_LENGTH = 200
MAX_TERMS = 1000
FILE_NAME = "episode_index.sqlite"
VERSION = 3  # of the tables and of what is summarised; a file of another version is made anew
MAX_CELL_BYTES = 4 * 2**20  # the searched words of an episode take a tenth of it at most
READER_WAIT_S = 10.0  # for another process that writes
TABLES = {
    "files": (
        "CREATE TABLE files (name TEXT PRIMARY KEY, size INTEGER, changed_ns INTEGER,"
        " inode INTEGER, problem TEXT)"
    ),
    # AUTOINCREMENT never gives a number twice, so words of removed episodes belong to nobody.
    "episodes": (
        "CREATE TABLE episodes (id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT,"
        f" {', '.join(COLUMNS)})"
    ),
    "episodes_by_file": "CREATE INDEX episodes_by_file ON episodes (file)",
    "episodes_by_step": "CREATE INDEX episodes_by_step ON episodes (source, step, line)",
    "episodes_by_status": "CREATE INDEX episodes_by_status ON episodes (source, status)",
    "episodes_by_task": (
        "CREATE INDEX episodes_by_task ON episodes (source, task, is_scored, reward, success)"
    ),
    "episodes_by_reward": (
        "CREATE INDEX episodes_by_reward ON episodes (source, reward, is_scored)"
    ),
    # Without `prefix`, the beginning of a word would be looked up in the lists of all such words.
    "words": "CREATE VIRTUAL TABLE words USING fts5(text, content='', prefix='1 2')",
}
MADE_BY_SQLITE = ("sqlite_", "words_")  # beginnings of names
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The values of one episode's row in the index, and its text for the search."""

    values: tuple[Any, ...]  # of COLUMNS from `group_id` on
    words: str


def summarise_row(row: Mapping[str, Any]) -> Summary:
    """Summarise one line of an episodes file.

    Raises LookupError, TypeError, ValueError, AttributeError or OverflowError if it is damaged.
    """
    turns = row["turns"]
    status = Status(row["status"])
    terms = {_name(name): _finite(value) for name, value in row["reward_terms"].items()}
    if len(terms) > MAX_TERMS:
        raise ValueError(f"it has {len(terms):,} reward terms; expected at most {MAX_TERMS:,}")
    advantages = row.get("advantages")
    replies = [turn["reply"] for turn in turns]
    error = row["error"] or row.get("unscored")
    is_scored = not status.is_failure and row.get("unscored") is None
    reward = _finite(row["reward"])
    return Summary(
        values=(
            _name(row["group"]),
            _small(row["member"]),
            _name(row["task"]["id"]),
            str(status),
            bool(row["success"]),
            is_scored,
            reward if is_scored else None,
            json.dumps(terms, allow_nan=False),
            fmean(map(_finite, advantages)) if advantages else None,
            len(turns),
            sum(_num_tokens(turn) for turn in turns),
            sum(turn["unusable"] is not None for turn in turns),
            status.is_limit or any(map(_is_cut_off, turns)),
            visible(error[:MAX_ERROR_LENGTH]) if error else None,
            visible(next((text for text in reversed(replies) if text), "")[:MAX_PREVIEW_LENGTH]),
        ),
        words=_words(row),
    )


def _name(text: str) -> str:
    return storable_text(text[:MAX_NAME_LENGTH])


def _finite(value: Any) -> float:
    """Return a finite number. SQLite stores NaN as NULL, which readers do not expect."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a reward; expected a finite number")
    return number


def _small(number: int) -> int:
    if not 0 <= number < 2**31:
        raise ValueError(f"{number!r:.40} is not the number of a member")
    return int(number)


def _num_tokens(turn: Mapping[str, Any]) -> int:
    usage = turn.get("usage")
    num_given = _small(usage["num_prompt_tokens"]) if usage else len(turn["prompt_ids"])
    return num_given + _num_sampled(turn)


def _num_sampled(turn: Mapping[str, Any]) -> int:
    usage = turn.get("usage")
    return _small(usage["num_completion_tokens"]) if usage else len(turn["completion_ids"])


def _is_cut_off(turn: Mapping[str, Any]) -> bool:
    return turn["finish"] == Finish.LENGTH and _num_sampled(turn) > 1


def _words(row: Mapping[str, Any]) -> str:
    """Join the texts that people search in, up to the limit."""
    found: list[str] = []
    _add_strings(row["error"], found)
    seen: Mapping[str, Any] = row["first_observation"]
    _add_strings(seen, found)
    for turn in row["turns"]:
        found.append(turn["reply"])
        _add_strings(turn["unusable"], found)
        for step in turn["steps"]:
            observation = step["observation"]
            for name, value in observation.items():
                if value != seen.get(name):
                    _add_strings(value, found)
            seen = observation
    _add_strings(row.get("output", ""), found)
    found += [each["explanation"] for each in row.get("judgements", {}).values()]
    return storable_text("\n".join(found)[:MAX_WORDS_LENGTH]).replace("\x00", " ")


def _add_strings(value: Any, found: list[str]) -> None:
    """Add all strings of a JSON value in order, without recursion: it may be nested deeply."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if kind is str:
            found.append(each)
        elif kind is dict:
            waiting.extend(reversed([*each.values()]))
        elif kind is list:
            waiting.extend(reversed(each))


class DamagedIndexError(Exception):
    """The index file is not one that `_make_or_check` wrote. Never leaves `index`."""


def open_or_remake(path: Path) -> sqlite3.Connection:
    """Open the index, made anew if it is damaged; a temporary one if the file cannot be used."""
    for _ in range(2):
        try:
            return connect(path, READER_WAIT_S)
        except (sqlite3.OperationalError, OSError) as error:  # It is locked, or not ours to write.
            _log.debug("the index %s cannot be used: %r", path, error)
            break
        except (sqlite3.Error, DamagedIndexError) as error:
            _log.debug("the index %s is damaged: %r", path, error)
            remove(path)
    return open_temporary()


def remove(path: Path) -> None:
    with suppress(OSError):
        for each in _files_of(path):
            each.unlink(missing_ok=True)


def _files_of(path: Path) -> list[Path]:
    """Return the index, and the files that SQLite may have beside it.

    A killed process leaves the journal. An index whose header names a write-ahead log makes SQLite
    open that and its shared memory, and write into both.
    """
    return [path.with_name(f"{path.name}{suffix}") for suffix in ("", "-journal", "-wal", "-shm")]


def connect(path: Path, wait_s: float) -> sqlite3.Connection:
    """Open the file, or make it. Raises DamagedIndexError, OSError or sqlite3.Error."""
    for each in _files_of(path):  # SQLite would write through a link into another file.
        if each.is_symlink() or (each.exists() and not each.is_file()):
            raise OSError(f"{each} is not a file")
    connection = sqlite3.connect(path, timeout=wait_s, check_same_thread=False)
    try:
        # A power failure may damage the file, which is then made anew; so nothing waits for a disk.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        _make_or_check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def open_temporary() -> sqlite3.Connection:
    """Return a database in a file that SQLite deletes."""
    connection = sqlite3.connect("", check_same_thread=False)
    _make_or_check(connection)
    return connection


def _make_or_check(connection: sqlite3.Connection) -> None:
    with connection:
        connection.execute("BEGIN IMMEDIATE" if _is_empty(connection) else "BEGIN")
        if _is_empty(connection):  # Another process may have made the tables meanwhile.
            for sql in TABLES.values():
                connection.execute(sql)
            connection.execute(f"PRAGMA user_version = {VERSION}")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    found = {
        name: sql
        for name, sql in connection.execute("SELECT name, sql FROM sqlite_master LIMIT 100")
        if not name.startswith(MADE_BY_SQLITE)
    }
    if version != VERSION or found != TABLES:
        raise DamagedIndexError(f"version {version}, tables {[*found]!r:.200}")


def _is_empty(connection: sqlite3.Connection) -> bool:
    (number,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return number == 0
