"""Measure what interpolations (`${a.b}`) become, before they are resolved."""

import re
from collections.abc import Mapping
from typing import Any

MAX_LENGTH = 1_000_000  # characters of a value with its interpolations, and values of a block
REFERENCE = re.compile(r"\$\{(\.*)([^${}:]+)\}")  # dots lead upward: ${..name}
Place = tuple[str, ...]


def refuse_exploding_interpolations(values: Mapping[str, Any]) -> None:
    """Check that no value becomes too large when its interpolations are resolved.

    values: a configuration whose interpolations are not resolved.

    Raises:
        ValueError: a value would be too large, or refers to others over too many levels.
    """
    sizes: dict[Place, int] = {}
    try:
        _size((), values, values, sizes)
    except RecursionError:
        raise ValueError("interpolations refer to each other over too many levels") from None


def _size(place: Place, value: Any, root: Mapping[str, Any], sizes: dict[Place, int]) -> int:
    """Return how large a value becomes; `sizes` has those that are known or being measured."""
    if place in sizes:
        return sizes[place]
    sizes[place] = 0  # for a value that refers to itself, which is refused when it is resolved
    if isinstance(value, Mapping):
        parts = [_size((*place, str(name)), each, root, sizes) for name, each in value.items()]
    elif isinstance(value, list):
        parts = [_size((*place, str(n)), each, root, sizes) for n, each in enumerate(value)]
    else:
        references = REFERENCE.findall(value) if isinstance(value, str) else []
        parts = [
            len(str(value)),
            *(_referred(place, dots, name, root, sizes) for dots, name in references),
        ]
    sizes[place] = sum(parts)
    if place and sizes[place] > MAX_LENGTH:
        raise ValueError(
            f"{'.'.join(place)}: its interpolations make more than {MAX_LENGTH:,} characters or "
            "values; a value that refers to the one before it several times doubles at every level"
        )
    return sizes[place]


def _referred(
    place: Place, dots: str, name: str, root: Mapping[str, Any], sizes: dict[Place, int]
) -> int:
    """Return the size of the value that an interpolation at `place` names; 0 if there is none."""
    parts = [part for part in re.split(r"[.\[\]]+", name.strip()) if part]
    found: Place = (*(place[: -len(dots)] if dots else ()), *parts)
    value: Any = root
    for part in found:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return 0
    return _size(found, value, root, sizes)
