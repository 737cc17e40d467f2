"""The SQLite file of the index of episodes: opened, checked, and made anew if it is damaged."""

import logging
import sqlite3
from contextlib import suppress
from pathlib import Path

from openenv_pipe.extras.viewer.episodes.query import COLUMNS

FILE_NAME = "episode_index.sqlite"
VERSION = 2  # of the tables and of what is summarised; a file of another version is made anew
MAX_CELL_BYTES = 4 * 2**20  # the searched words of an episode have a tenth of it
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
    # Without `prefix`, the beginning of a word would be looked up in the lists of all its words.
    "words": "CREATE VIRTUAL TABLE words USING fts5(text, content='', prefix='1 2')",
}
MADE_BY_SQLITE = ("sqlite_", "words_")  # beginnings of names
_log = logging.getLogger(__name__)


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
    """Delete an index that cannot be used."""
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
