"""Search texts with regular expressions within a time limit.

Python's `re` has no such limit, and a pattern like `^(a+)+$` takes longer than a lifetime on some
texts of forty characters. The patterns come from configurations, environment servers and folders of
models, the texts from models.
"""

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import regex

from openenv_pipe.system.process import usable_cores

# For one search, in processor time.
LIMIT_S = 0.5 * len(usable_cores())
MAX_SIZE = 100_000  # parts with repetitions written out; `regex` takes 300 bytes for each


class SlowPatternError(Exception):
    """A search took too long. The text is for the model whose reply was searched."""


def compile_untrusted(source: str, flags: int = 0) -> Any:
    """Compile a regular expression in the syntax of Python's `re`; its searches take a `timeout`.

    Raises ValueError if `source` is not a regular expression, or is too large.
    """
    try:
        re.compile(source)  # `regex` allows more than `re`, such as the same name twice.
        # Python has no public parser of its regular expressions.
        if _size(re._parser.parse(source)) > MAX_SIZE:  # type: ignore[attr-defined]
            raise ValueError(f"its repetitions, written out, have more than {MAX_SIZE} parts")
        return regex.compile(source, flags)
    except (re.error, regex.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it nests too deep") from None


class LimitedPattern:
    """A compiled regular expression in the syntax of Python's `re`."""

    def __init__(self, source: str) -> None:
        """Raises ValueError if `source` is not a regular expression, or is too large."""
        self._pattern = compile_untrusted(source)
        self.source = source

    @property
    def groups(self) -> Mapping[str, int]:
        return self._pattern.groupindex

    def search(self, text: str, limit_s: float = LIMIT_S) -> Any:
        """Return the first match, as `re.search` does, or None. Raises SlowPatternError.

        limit_s: of this thread's processor time.
        """
        timeout = limit_s
        while True:
            begun_s = time.thread_time()
            try:
                return self._pattern.search(text, timeout=timeout)
            except TimeoutError:
                if time.thread_time() - begun_s > 0.8 * limit_s:
                    raise SlowPatternError(
                        f"a text of {len(text)} characters cannot be matched with "
                        f"{self.source!r:.200} in the time that a search may take"
                    ) from None
            # `regex` counts the whole process's time, of which other threads had the most.
            timeout *= 2


def _size(parsed: Any) -> int:
    """Return the size of a parsed expression in which each repetition is written out."""
    size = 0
    for kind, value in parsed:
        if str(kind) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            fewest, _, inner = value
            size += max(fewest, 1) * _size(inner)
        else:
            size += 1 + sum(map(_size, _sequences(value, type(parsed))))
    return size


def _sequences(value: Any, kind: type) -> Iterator[Any]:
    """Yield the parsed expressions in what an operator holds, such as branches of `|`."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _sequences(each, kind)
