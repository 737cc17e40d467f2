"""Compile the patterns of a reply format, with a limit of time for those of a model's folder.

Python's `re` has no such limit, and an untrusted `response_template` may take longer than a
lifetime to read some reply of forty characters.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import regex

from openenv_pipe.system.process import usable_cores

# For all searches in a reply, in processor time of the process, which its other threads use too.
LIMIT_S = 0.5 * len(usable_cores())
_ends_at: ContextVar[float] = ContextVar("_ends_at")  # that processor time
Compile = Callable[[str], re.Pattern[str]]


@contextmanager
def within_limit() -> Iterator[None]:
    """Within the block, the searches of untrusted patterns share the limit."""
    token = _ends_at.set(time.process_time() + LIMIT_S)
    try:
        yield
    finally:
        _ends_at.reset(token)


class SlowReplyError(Exception):
    """A pattern of the model's folder takes too long on a reply."""


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of this package."""
    return re.compile(pattern, re.DOTALL)


def limited(pattern: str) -> Any:
    """Compile an untrusted pattern; its searches raise SlowReplyError.

    It has the methods of `re.Pattern` that readers use. Raises re.error.
    """
    re.compile(pattern)  # `regex` allows more than `re`
    try:
        return _Limited(pattern)
    except regex.error as error:
        raise re.error(str(error)) from error


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

    def finditer(self, *where: Any) -> Iterator[Any]:
        found = self._within_limit(self._regex.finditer, where)
        while (each := self._within_limit(lambda timeout: next(found, None), ())) is not None:
            yield each

    def _within_limit(self, method: Callable[..., Any], where: tuple[Any, ...]) -> Any:
        now = time.process_time()
        left = _ends_at.get(now + LIMIT_S) - now
        try:
            if left > 0:
                return method(*where, timeout=left)
        except TimeoutError:
            pass
        raise SlowReplyError(f"the model's {self.pattern!r:.80} takes too long")
