"""Whether two mathematical expressions are equal, by math-verify; `workers` calls this."""

from collections.abc import Iterator, Mapping
from typing import Any

from math_verify import parse, verify


def is_equal(answer: str, row: Mapping[str, Any]) -> float:
    r"""Return 1.0 if the answer equals the row's own answer.

    Either may be an expression alone, plain (`1/2`) or LaTeX, or a text whose last expression is in
    `\boxed{}`, between dollars, or a number. Raises ValueError if the row's answer cannot be read.
    """
    own = next((read for read in _readings(str(row["answer"])) if read), None)
    if own is None:
        raise ValueError(f"answer is {row['answer']!r:.200}, which is no mathematical expression")
    # The worker's time is limited as a whole, also where the library's own limits do not work.
    return float(any(verify(own, given, timeout_seconds=None) for given in _readings(answer)))


def _readings(text: str) -> Iterator[list[Any]]:
    """Yield how a text is read: as an expression alone, unless it marks one, and as prose."""
    if "$" not in text and "boxed" not in text:
        yield parse(f"${text}$", parsing_timeout=None)
    yield parse(text, parsing_timeout=None)
