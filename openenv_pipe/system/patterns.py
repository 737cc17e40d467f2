"""Search texts by regular expressions within a limit of time.

Python's `re` has no such limit, and a pattern like `^(a+)+$` takes longer than a lifetime on some
texts of forty characters. The patterns come from configurations and environment servers, the texts
from models.
"""

import re
from collections.abc import Mapping
from typing import Any

import regex

LIMIT_S = 0.5  # of processor time, for one search


class SlowPatternError(Exception):
    """A search took too long. The text is for the model whose reply was searched."""


class LimitedPattern:
    """A compiled regular expression in the syntax of Python's `re`."""

    def __init__(self, source: str) -> None:
        """Raises ValueError if `source` is not a regular expression."""
        try:
            re.compile(source)  # `regex` allows more than `re`, such as the same name twice.
            self._pattern = regex.compile(source)
        except (re.error, regex.error, OverflowError) as error:
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError("it nests too deep") from None
        self.source = source

    @property
    def groups(self) -> Mapping[str, int]:
        """The numbers of the named groups."""
        return self._pattern.groupindex

    def search(self, text: str, limit_s: float = LIMIT_S) -> Any:
        """Return the first match, as `re.search` does, or None. Raises SlowPatternError."""
        try:
            return self._pattern.search(text, timeout=limit_s)
        except TimeoutError:
            raise SlowPatternError(
                f"a text of {len(text)} characters cannot be matched with {self.source!r:.200} "
                "in the time that a search may take"
            ) from None
