"""Full-text search in a mailbox, by SQLite's FTS5. An index is read-only and shared by sessions."""

import re
import sqlite3
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

from .mailbox import MAX_CACHED, Message, mailbox

MAX_WORDS = 20  # of a query; what follows is ignored
_SEARCH = """
    SELECT message_id, snippet(messages, 2, '', '', '...', 12) FROM messages
    WHERE messages MATCH ? ORDER BY bm25(messages, 0, 2, 1, 1), message_id LIMIT ?
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A message that was found, and the part of its body that fits best."""

    message: Message
    snippet: str


class Index:
    """The messages of one mailbox, by id and by words."""

    def __init__(self, messages: tuple[Message, ...]) -> None:
        self._messages = {message.message_id: message for message in messages}
        self._lock = Lock()  # One connection for all sessions, whatever threads they have.
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.execute(
            "CREATE VIRTUAL TABLE messages USING fts5"
            "(message_id UNINDEXED, subject, body, sender, tokenize='porter unicode61')"
        )
        rows = [(each.message_id, each.subject, _line(each.body), each.sender) for each in messages]
        self._connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", rows)

    def search(self, query: str, limit: int) -> list[Hit]:
        """The best hits: messages with all the words of the query, else with any of them."""
        words = [f'"{word}"' for word in re.findall(r"\w+", query)[:MAX_WORDS]]
        if not words:
            return []
        rows = self._match(" AND ".join(words), limit) or self._match(" OR ".join(words), limit)
        return [Hit(message=self._messages[row[0]], snippet=row[1]) for row in rows]

    def get(self, message_id: str) -> Message | None:
        """The message of an id, if there is one."""
        return self._messages.get(message_id.strip())

    def _match(self, expression: str, limit: int) -> list[tuple[str, str]]:
        with self._lock:
            return self._connection.execute(_SEARCH, (expression, limit)).fetchall()


def _line(text: str) -> str:
    return text.replace("\n", " ")


@lru_cache(maxsize=MAX_CACHED)
def index(number: int) -> Index:
    """The index of the mailbox of a number, made once."""
    return Index(mailbox(number).messages)
