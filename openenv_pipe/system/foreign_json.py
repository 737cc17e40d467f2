"""Parse JSON that others wrote: environment servers, and models.

Its values can be used without further checks: they nest at most `MAX_DEPTH` levels, so that no
recursive function fails on them, and their texts can be encoded.
"""

import json
from collections.abc import Sequence
from typing import Any

MAX_DEPTH = 64  # levels of lists and objects

_decode = json.JSONDecoder().decode


def parse_foreign(content: str | bytes) -> Any:
    """Parse JSON. Characters that are half a surrogate pair become question marks.

    Raises:
        ValueError: it is not JSON, or nests too deep.
    """
    text = content if isinstance(content, str) else content.decode()
    try:
        value = _decode(text)
    except RecursionError:
        raise too_deep() from None
    require_shallow(value, text)
    if "\\ud" in text or "\\uD" in text:  # An escape is the only way to write half a pair.
        (value,) = encodable_json([value])
    return value


def require_shallow(value: Any, text: str) -> None:
    """Raise ValueError if the value of the JSON `text` nests deeper than `MAX_DEPTH`."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _members(outer)]
        if not level:
            return
    if any(isinstance(each, dict | list) for each in level):
        raise too_deep()


def encodable(text: str) -> str:
    """Return the text with question marks in place of halves of surrogate pairs."""
    return text.encode(errors="replace").decode()


def encodable_json(values: Sequence[Any]) -> list[Any]:
    """Copy JSON values, with halves of surrogate pairs, which UTF-8 cannot encode, as `?`."""
    return json.loads(encodable(json.dumps(list(values), ensure_ascii=False)))


def too_deep() -> ValueError:
    """Return the error for JSON that nests too deep."""
    return ValueError(f"it nests more than {MAX_DEPTH} levels deep")


def _members(value: Any) -> list[Any]:
    """Return what a list or an object contains."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
