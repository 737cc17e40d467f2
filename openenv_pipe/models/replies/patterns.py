"""Compile the patterns of a reply format, with a limit of time for those of a model's folder.

Python's `re` has no such limit, and an untrusted `response_template` may take longer than a
lifetime to read some reply of forty characters.
"""

import re
from collections.abc import Callable
from typing import Any

import regex

LIMIT_S = 0.5  # for one search
Compile = Callable[[str], re.Pattern[str]]


class SlowReplyError(Exception):
    """A pattern of the model's folder takes too long on a reply."""


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of this package."""
    return re.compile(pattern, re.DOTALL)


def limited(pattern: str) -> Any:
    """Compile an untrusted pattern; its searches raise SlowReplyError.

    It has the methods of `re.Pattern` that readers use.
    """
    re.compile(pattern)  # `regex` allows more than `re`
    return _Limited(pattern)


class _Limited:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._regex = regex.compile(pattern, regex.DOTALL)

    def search(self, *where: Any) -> Any:
        return self._within_limit(self._regex.search, where)

    def match(self, *where: Any) -> Any:
        return self._within_limit(self._regex.match, where)

    def fullmatch(self, *where: Any) -> Any:
        return self._within_limit(self._regex.fullmatch, where)

    def finditer(self, text: str, *where: int) -> Any:
        start, end = where[0] if where else 0, where[1] if len(where) > 1 else len(text)
        while found := self.search(text, start, end):
            yield found
            start = max(found.end(), start + 1)

    def _within_limit(self, method: Callable[..., Any], where: tuple[Any, ...]) -> Any:
        try:
            return method(*where, timeout=LIMIT_S)
        except TimeoutError:
            raise SlowReplyError(f"the model's {self.pattern!r:.80} takes too long") from None
