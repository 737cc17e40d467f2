"""An index of a run's episodes, which makes lists, filters and text searches of them quick.

It is one SQLite file in the run folder, `episode_index.sqlite`, derived from `episodes/` and
`eval/`: it may be deleted at any time. Training adds each step to it (`index_episodes`). A reader
first brings it up to date (`EpisodeIndex.open`): files that are new or have changed are read, and
rows of files that are gone are removed, as after a resume. A damaged index is made anew. Where the
folder cannot be written to, the index is a temporary file of the reader.

A run folder may be another user's, so an index with any other table or trigger than ours is not
used, and everything that comes from one is text of others.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.episodes.index_file import (
    FILE_NAME,
    DamagedIndexError,
    Summary,
    connect,
    open_or_remake,
    open_temporary,
    remove,
    summarise_row,
)
from openenv_pipe.extras.viewer.episodes.query import (
    COLUMNS,
    ORDERS,
    TRAIN,
    Choices,
    EpisodeFilter,
    Histogram,
    IndexedEpisode,
    Order,
    TaskSummary,
    as_episode,
    condition,
    counted_table,
    phrase_of,
    reward_expression,
)
from openenv_pipe.runs.episodes import enumerate_rows
from openenv_pipe.system.files import stamp_of
from openenv_pipe.system.untrusted_text import visible

WRITER_WAIT_S = 0.2  # of a training run, which does without the index rather than wait
EPISODES_SUFFIX = ".jsonl.gz"
_log = logging.getLogger(__name__)


def index_episodes(folder: Path, file: Path) -> None:
    """Add a newly written file to the index of its run, if nothing is in the way.

    Never raises because of the index: a reader adds what is missing.
    """
    try:
        with closing(connect(folder / FILE_NAME, WRITER_WAIT_S)) as connection:
            _index_file(connection, folder, file)
    except (sqlite3.Error, DamagedIndexError, OSError) as error:
        _log.debug("%s was not added to the index of episodes: %r", file, error)


class EpisodeIndex:
    """The index of one run, for reading. Its methods may be called from any thread."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self._connection = connection
        self._lock = RLock()
        self._choices: dict[str, Choices] = {}
        self._matched: str | None = None  # the phrase whose episodes the table `matches` has
        self._data_version = -1  # of the index from which these two were read

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> "Iterator[EpisodeIndex]":
        """Open the index of a run folder and bring it up to date; close it after the block."""
        index = cls.opened(folder)
        try:
            yield index
        finally:
            index.close()

    @classmethod
    def opened(cls, folder: Path) -> "EpisodeIndex":
        """Return the index of a run folder, up to date; the caller closes it.

        Raises RunFolderError: this Python's SQLite has no full text search, or there is no space.
        """
        try:
            index = cls(folder, open_or_remake(folder / FILE_NAME))
            index.refresh()
        except sqlite3.Error as error:
            raise RunFolderError(
                f"cannot make an index of the episodes of {folder}: {error}; "
                "it needs SQLite with FTS5, and space for temporary files"
            ) from error
        return index

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def refresh(self) -> None:
        """Add new and changed files, and remove the rows of those that are gone."""
        with self._lock:
            num_changes = self._connection.total_changes
            try:
                _refresh(self._connection, self.folder)
            except sqlite3.Error as error:
                self._remake(error)
            if self._connection.total_changes != num_changes:
                self._forget_answers()

    def _forget_answers(self) -> None:
        self._choices.clear()
        self._matched = None

    def _remake(self, error: Exception) -> None:
        """Replace an index that cannot be used. Raises sqlite3.Error if the new one cannot be."""
        _log.debug("the index of the episodes of %s cannot be used: %r", self.folder, error)
        self._connection.close()
        self._forget_answers()
        path = self.folder / FILE_NAME
        is_damaged = not isinstance(error, sqlite3.OperationalError)  # rather than locked
        if is_damaged:
            remove(path)
        self._connection = open_or_remake(path) if is_damaged else open_temporary()
        _refresh(self._connection, self.folder)

    def count(self, wanted: EpisodeFilter) -> int:
        where, parameters = condition(wanted)
        sql = f"SELECT count(*) FROM {counted_table(wanted)} WHERE {where}"
        return self._all(sql, parameters, matching=phrase_of(wanted))[0][0]

    def find(
        self,
        wanted: EpisodeFilter,
        *,
        order: Order = "step",
        descending: bool = False,
        limit: int = 100,
        offset: int = 0,
    ) -> list[IndexedEpisode]:
        """Return the episodes that are wanted. Equal ones are in the order of their files.

        Episodes without a value to sort by come last.
        """
        where, parameters = condition(wanted)
        column, way = ORDERS[order], "DESC" if descending else "ASC"
        # Steps are null in evaluations only, and with NULLS LAST no index gives the order.
        can_be_null = order in ("reward", "advantage") or wanted.source is None
        nulls = " NULLS LAST" if can_be_null else ""
        sql = (
            f"SELECT {', '.join(COLUMNS)} FROM episodes WHERE {where}"
            f" ORDER BY {column} {way}{nulls}, source, step, line LIMIT ? OFFSET ?"
        )
        given = [*parameters, limit, offset]
        return self._all(sql, given, as_episode, matching=phrase_of(wanted))

    def histogram(
        self, wanted: EpisodeFilter, *, term: str | None = None, num_bins: int = 20
    ) -> Histogram | None:
        """Count scored episodes by reward, or by a reward term; None if there are none."""
        value, names = reward_expression(term)
        where, parameters = condition(wanted)
        ordered, counted = (
            f"SELECT {value} AS v FROM {table} WHERE is_scored AND {where}"
            for table in ("episodes", counted_table(wanted))
        )
        given, phrase = [*names, *parameters], phrase_of(wanted)
        # Two queries, each of which an index can answer without reading all rows.
        ((low, high),) = self._all(
            f"SELECT (SELECT min(v) FROM ({ordered})), (SELECT max(v) FROM ({ordered}))",
            [*given, *given],
            matching=phrase,
        )
        if low is None:
            return None
        width = (high - low) / num_bins
        if not 0 < width < float("inf"):
            ((number,),) = self._all(f"SELECT count(v) FROM ({counted})", given, matching=phrase)
            return Histogram(low=low, high=high, counts=[number])
        rows = self._all(
            f"SELECT min(CAST((v - ?) / ? AS INTEGER), ?) AS bin, count(*) FROM ({counted})"
            " WHERE v IS NOT NULL GROUP BY bin",
            [low, width, num_bins - 1, *given],
            matching=phrase,
        )
        counts = dict(rows)
        return Histogram(low=low, high=high, counts=[counts.get(i, 0) for i in range(num_bins)])

    def choices(self, source: str = TRAIN) -> Choices:
        with self._lock:
            self._notice_other_writers()
            if source not in self._choices:
                self._choices[source] = self._read_choices(source)
            return self._choices[source]

    def _read_choices(self, source: str) -> Choices:
        of_source = "FROM episodes WHERE source = ?"
        ((num_steps, last_step),) = self._all(
            f"SELECT count(DISTINCT step), max(step) {of_source}", [source]
        )
        terms = self._all(
            "SELECT DISTINCT key FROM (SELECT terms FROM episodes WHERE source = ?"
            " ORDER BY step DESC LIMIT 1000), json_each(terms)",
            [source],
        )
        problems = self._all("SELECT problem FROM files WHERE problem IS NOT NULL ORDER BY name")
        return Choices(
            sources=dict(self._all("SELECT source, count(*) FROM episodes GROUP BY source")),
            statuses=dict(
                self._all(f"SELECT status, count(*) {of_source} GROUP BY status", [source])
            ),
            terms=sorted(key for (key,) in terms),
            num_steps=num_steps,
            last_step=last_step,
            problems=[problem for (problem,) in problems],
        )

    def tasks(self, source: str = TRAIN, limit: int = 1000) -> list[TaskSummary]:
        """Return the tasks of a source; those with the lowest mean reward come first."""
        return self._all(
            "SELECT task, count(*), avg(CASE WHEN is_scored THEN reward END) AS mean,"
            " avg(CASE WHEN is_scored THEN success END) FROM episodes"
            " WHERE source = ? GROUP BY task ORDER BY mean NULLS LAST, task LIMIT ?",
            [source, limit],
            lambda row: TaskSummary(
                task=str(row[0]), num_episodes=int(row[1]), reward=row[2], success=row[3]
            ),
        )

    def task_steps(self, source: str = TRAIN) -> list[tuple[str, int, float]]:
        """Return the mean reward of each task in each step of GRPO that played it."""
        return self._all(
            "SELECT task, step, avg(reward) FROM episodes"
            " WHERE source = ? AND is_scored AND step > 0 GROUP BY task, step",
            [source],
        )

    def _all(
        self,
        sql: str,
        parameters: Sequence[Any] = (),
        convert: Callable[[tuple[Any, ...]], Any] = lambda row: row,
        *,
        matching: str | None = None,
    ) -> list[Any]:
        """Query the index; if it turns out to be damaged, make it anew and query that.

        matching: the phrase whose episodes the query finds in the table `matches`.
        """

        def ask() -> list[Any]:
            if matching is not None:
                self._match(matching)
            return [convert(row) for row in self._connection.execute(sql, parameters)]

        with self._lock:
            try:
                return ask()
            except (sqlite3.Error, TypeError, ValueError, AttributeError, OverflowError) as error:
                try:
                    self._remake(error)
                    return ask()
                except sqlite3.Error as again:
                    raise RunFolderError(
                        f"cannot query the episodes of {self.folder}: {again}"
                    ) from again

    def _match(self, phrase: str) -> None:
        """Search once for all queries about the same text, of which a page has several."""
        self._notice_other_writers()
        if phrase == self._matched:
            return
        self._matched = None
        with self._connection as connection:
            connection.execute("CREATE TEMP TABLE IF NOT EXISTS matches (id INTEGER PRIMARY KEY)")
            connection.execute("DELETE FROM temp.matches")
            connection.execute(
                "INSERT INTO temp.matches SELECT rowid FROM words WHERE words MATCH ?", [phrase]
            )
        self._matched = phrase

    def _notice_other_writers(self) -> None:
        """Forget answers that are older than what another process has written."""
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        if version != self._data_version:
            self._forget_answers()
            self._data_version = version


def _refresh(connection: sqlite3.Connection, folder: Path) -> None:
    stamps = connection.execute("SELECT name, size, changed_ns, inode FROM files")
    known = {name: tuple(stamp) for name, *stamp in stamps}
    present = _episode_files(folder)
    for name in known.keys() - present.keys():
        with connection:
            _forget(connection, name)
    for name, entry in present.items():
        with suppress(OSError):  # It has been set aside meanwhile.
            if known.get(name) != stamp_of(entry):
                _index_file(connection, folder, Path(entry.path))


def _episode_files(folder: Path) -> dict[str, os.DirEntry[str]]:
    """Return the files of episodes by their names in the index."""
    found: dict[str, os.DirEntry[str]] = {}
    for part, beginning in (("episodes", "step_"), ("eval", "")):
        # Names behind a link are not the run's.
        is_link = (folder / part).is_symlink()
        with suppress(OSError), os.scandir(os.devnull if is_link else folder / part) as entries:
            for entry in entries:
                name = entry.name
                if name.endswith(EPISODES_SUFFIX) and name.startswith(beginning) and name[0] != ".":
                    found[f"{part}/{name}".encode(errors="backslashreplace").decode()] = entry
    return dict(sorted(found.items()))


def source_and_step(name: str) -> tuple[str, int | None]:
    """Return the source and the step of a file's episodes, from its name in the run folder."""
    folder, _, rest = name.removesuffix(EPISODES_SUFFIX).partition("/")
    if folder == "eval":
        return f"eval/{rest}", None
    step = rest.removeprefix("step_")
    return TRAIN, int(step) if step.isascii() and step.isdecimal() and len(step) < 10 else None


def file_of(folder: Path, source: str, step: int | None) -> Path:
    """Return the file of an indexed episode. Raises RunFolderError if there is no such file."""
    for name, entry in _episode_files(folder).items():
        if source_and_step(name) == (source, step):
            return Path(entry.path)
    raise RunFolderError(f"{folder} has no episodes of {source!r:.80}, step {step}")


def _index_file(connection: sqlite3.Connection, folder: Path, path: Path) -> None:
    """Replace the rows of one file by what it has now. Raises OSError and sqlite3.Error."""
    stamp = stamp_of(path)
    name = path.relative_to(folder).as_posix().encode(errors="backslashreplace").decode()
    problem: str | None = None
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        _forget(connection, name)
        # Rows go into the database as they are read: all rows of a file may fill the memory.
        connection.execute("SAVEPOINT rows")
        try:
            _insert_rows(connection, name, path)
        except RunFolderError as error:
            connection.execute("ROLLBACK TO rows")
            problem = visible(str(error))
        connection.execute("RELEASE rows")
        connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)", [name, *stamp, problem])


def _insert_rows(connection: sqlite3.Connection, name: str, path: Path) -> None:
    source, step = source_and_step(name)
    marks = ", ".join("?" * (len(COLUMNS) + 1))
    for line, summary in _summaries(path):
        row = connection.execute(
            f"INSERT INTO episodes (file, {', '.join(COLUMNS)}) VALUES ({marks})",
            [name, source, step, line, *summary.values],
        )
        connection.execute(
            "INSERT INTO words (rowid, text) VALUES (?, ?)", [row.lastrowid, summary.words]
        )


def _summaries(path: Path) -> Iterator[tuple[int, Summary]]:
    for line, row in enumerate_rows(path):
        try:
            yield line, summarise_row(row)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RunFolderError(f"{path} has a damaged episode: {error!r:.200}") from error


def _forget(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("DELETE FROM episodes WHERE file = ?", [name])
    connection.execute("DELETE FROM files WHERE name = ?", [name])
