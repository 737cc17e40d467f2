"""Full-text search in a mailbox with SQLite's FTS5. Sessions share an index, which is read-only."""

import re
import sqlite3
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

from .mailbox import MAX_CACHED, Message, mailbox

MAX_WORDS = 20  # of a query; further words are ignored
_SEARCH = """
    SELECT message_id, snippet(messages, 2, '', '', '...', 12) FROM messages
    WHERE messages MATCH ? ORDER BY bm25(messages, 0, 2, 1, 1), message_id LIMIT ?
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A message that was found, and the best matching part of its body."""

    message: Message
    snippet: str


class Index:
    """The messages of one mailbox, to be found by id or by words."""

    def __init__(self, messages: tuple[Message, ...]) -> None:
        self._messages = {message.message_id: message for message in messages}
        self._lock = Lock()  # All sessions, in several threads, share one connection.
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.execute(
            "CREATE VIRTUAL TABLE messages USING fts5"
            "(message_id UNINDEXED, subject, body, sender, tokenize='porter unicode61')"
        )
        rows = [(each.message_id, each.subject, _line(each.body), each.sender) for each in messages]
        self._connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", rows)

    def search(self, query: str, limit: int) -> list[Hit]:
        """Return the best hits: messages with all words of the query, else with any of them."""
        words = [f'"{word}"' for word in re.findall(r"\w+", query)[:MAX_WORDS]]
        if not words:
            return []
        rows = self._match(" AND ".join(words), limit) or self._match(" OR ".join(words), limit)
        return [Hit(message=self._messages[row[0]], snippet=row[1]) for row in rows]

    def get(self, message_id: str) -> Message | None:
        """Return the message with this id, or None if there is none."""
        return self._messages.get(message_id.strip())

    def _match(self, expression: str, limit: int) -> list[tuple[str, str]]:
        with self._lock:
            return self._connection.execute(_SEARCH, (expression, limit)).fetchall()


def _line(text: str) -> str:
    return text.replace("\n", " ")


@lru_cache(maxsize=MAX_CACHED)
def index(number: int) -> Index:
    """Return the index of mailbox `number`, which is built once and cached."""
    return Index(mailbox(number).messages)
