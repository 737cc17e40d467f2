"""What any value of a configuration may be: plain data that YAML, JSON and a terminal can show.

The types of single keys are in the blocks. What is checked here holds for free mappings too, such
as the `options` of a target, whose values no block describes.
"""

import math
import unicodedata
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64
MAX_VALUES = 100_000
MAX_DIGITS = 4000  # of a whole number; Python's own limit is 4,300
MAX_KEY_LENGTH = 200  # in messages
PLAIN = "text, a number, true, false, null, a list or a mapping"


def reject_unusual_values(document: Mapping[Any, Any]) -> None:
    """Check all values of a document, without recursion, because a value may contain itself.

    Raises:
        ValueError: a value is not plain data, is not finite, has control characters, or there are
            too many values or levels. The message names the key.
    """
    remaining: deque[tuple[tuple[str, ...], Any]] = deque([((), document)])
    num_values = 0
    while remaining:
        place, value = remaining.popleft()
        num_values += 1
        if num_values > MAX_VALUES:
            raise ValueError(
                f"the configuration has more than {MAX_VALUES:,} values; is an alias repeated? Put "
                "large data into a file"
            )
        if problem := _problem(value):
            raise ValueError(f"{_key(place)}: {problem}")
        if len(place) > MAX_DEPTH:
            raise ValueError(
                f"{_key(place[:3])}...: values are nested more than {MAX_DEPTH} levels deep"
            )
        remaining += [((*place, name), each) for name, each in _children(place, value)]


def _children(place: tuple[str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        yield from ((str(index), each) for index, each in enumerate(value))
    if not isinstance(value, Mapping):
        return
    for name, each in value.items():
        if not isinstance(name, str):
            raise ValueError(f"{_key((*place, str(name)))}: the key is {name!r}; put it in quotes")
        if problem := _text_problem(name, allowed=""):
            raise ValueError(f"{_key((*place, name))}: the key: {problem}")
        yield name, each


def _problem(value: Any) -> str | None:
    """Say what is wrong with a value itself; the values that it contains are checked later."""
    match value:
        case None | bool() | Mapping() | list() | tuple():
            return None
        case int():
            too_long = value.bit_length() > MAX_DIGITS * math.log2(10)
            return f"a number of more than {MAX_DIGITS:,} digits" if too_long else None
        case float():
            return None if math.isfinite(value) else f"{value}; expected a finite number"
        case str():
            return _text_problem(value, allowed="\t\n\r")
    if hasattr(type(value), "model_fields"):  # a block, from Python
        return None
    return f"a value of type {type(value).__name__}; expected {PLAIN}"


def _text_problem(text: str, allowed: str) -> str | None:
    strange = next((char for char in text if _is_control(char) and char not in allowed), None)
    if strange is None:
        return None
    return f"text with the control character U+{ord(strange):04X}; remove it"


def _is_control(char: str) -> bool:
    """Whether a terminal might obey it, or a file cannot store it (half of a surrogate pair)."""
    return unicodedata.category(char) in ("Cc", "Cs")


def _key(place: tuple[str, ...]) -> str:
    text = ".".join(place)[:MAX_KEY_LENGTH] or "the configuration"
    return "".join(f"\\x{ord(char):02x}" if _is_control(char) else char for char in text)
