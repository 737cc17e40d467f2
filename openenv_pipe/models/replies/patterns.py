"""Compile the patterns of a reply format; those of a model's folder share a limit of time."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from openenv_pipe.system.patterns import LIMIT_S, SlowPatternError, compile_untrusted

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


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of this package."""
    return re.compile(pattern, re.DOTALL)


def limited(pattern: str) -> Any:
    """Compile an untrusted pattern; its searches raise SlowPatternError.

    It has the methods of `re.Pattern` that readers use. Raises ValueError.
    """
    return _Limited(pattern)


class _Limited:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._regex = compile_untrusted(pattern, re.DOTALL)

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
        raise SlowPatternError(f"the model's {self.pattern!r:.80} takes too long")
