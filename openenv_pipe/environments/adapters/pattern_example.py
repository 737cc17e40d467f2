"""Find a text that a regular expression matches, to show a model what a usable reply is."""

import re
from collections.abc import Iterable, Sequence
from string import ascii_lowercase
from typing import Any

from openenv_pipe.system.patterns import LimitedPattern, SlowPatternError

MAX_LENGTH = 200  # characters; a longer example is of no help
MAX_DEPTH = 20  # levels of groups
ANYTHING = "..."  # for what may be any text
CATEGORIES = {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " "}  # others have letters


def example_of(pattern: LimitedPattern) -> str | None:
    """Return a text whose match has a value for a named group; None if none is found."""
    try:
        # Python has no public parser of its regular expressions.
        parsed = re._parser.parse(pattern.source)  # type: ignore[attr-defined]
        text = _text(parsed, 0).strip()
        match = pattern.search(text)
    except (AttributeError, KeyError, LookupError, RecursionError, ValueError, SlowPatternError):
        return None
    is_usable = match is not None and any(match.groupdict().values())
    return text if is_usable and len(text) <= MAX_LENGTH else None


def _text(parts: Iterable[tuple[Any, Any]], depth: int) -> str:
    """Return an example of a sequence of parts. Raises LookupError for parts that have none."""
    if depth > MAX_DEPTH:
        raise LookupError
    written = ""
    for kind, value in parts:
        written += _part(str(kind), value, depth)
        if len(written) > MAX_LENGTH:
            raise LookupError
    return written


def _part(kind: str, value: Any, depth: int) -> str:
    match kind:
        case "LITERAL":
            return chr(value)
        case "ANY":
            return "x"
        case "IN":
            return _member(value, 0)
        case "NOT_LITERAL":
            return "b" if chr(value) == "a" else "a"
        case "BRANCH":
            return _text(value[1][0], depth + 1)
        case "SUBPATTERN":
            return _text(value[-1], depth + 1)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            fewest, most, parts = value
            return _repeated(fewest, most, parts, depth)
        case "AT" | "ASSERT" | "ASSERT_NOT":  # positions, and what comes before or after
            return ""
    raise LookupError(kind)


def _repeated(fewest: int, most: int, parts: Sequence[tuple[Any, Any]], depth: int) -> str:
    """Return as few repetitions as the pattern allows; `...` where it allows any text."""
    kind, value = (str(parts[0][0]), parts[0][1]) if len(parts) == 1 else ("", ())
    if kind == "ANY" and most > len(ANYTHING) >= fewest:
        return ANYTHING
    fewest = min(fewest, MAX_LENGTH + 1)
    if kind == "IN":
        return "".join(_member(value, number) for number in range(fewest))
    return _text(parts, depth + 1) * fewest


def _member(members: Sequence[tuple[Any, Any]], number: int) -> str:
    """Return a character of a class; those of different numbers differ where the class allows."""
    for kind, value in members:
        match str(kind):
            case "NEGATE":
                allowed = _negated(members)
                return allowed[number % len(allowed)]
            case "LITERAL":
                return chr(value)
            case "RANGE":
                low, high = value
                return chr(low + number % (high - low + 1))
            case "CATEGORY":
                return CATEGORIES.get(str(value), ascii_lowercase[number % 26])
    raise LookupError


def _negated(members: Sequence[tuple[Any, Any]]) -> str:
    """Return the letters that a negated class of single characters and ranges allows."""
    excluded = {chr(value) for kind, value in members if str(kind) == "LITERAL"}
    spans = [value for kind, value in members if str(kind) == "RANGE"]
    return "".join(
        letter
        for letter in ascii_lowercase
        if letter not in excluded and not any(low <= ord(letter) <= high for low, high in spans)
    )
