"""Parse JSON that others wrote: environment servers, models, and clients of our own servers.

Its values can be used without further checks: they nest at most `MAX_DEPTH` levels, so that no
recursive function fails on them, and their texts can be encoded.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

MAX_DEPTH = 64  # levels of lists and objects
MAX_VALUES = 200_000  # of a request
MAX_INTEGER = 2**63  # in absolute value, of a request

_decode = json.JSONDecoder().decode
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def parse_untrusted(content: str | bytes) -> Any:
    """Parse JSON. Characters that are half a surrogate pair become question marks.

    Raises ValueError: it is not JSON, or nests too deep.
    """
    return _parse(content, _decode)


def parse_request(content: str | bytes) -> Any:
    """Parse the JSON of a request to a server of this program.

    All its numbers can be computed with: they are finite, and integers are those of 64 bits.

    Raises ValueError: it is not JSON, nests too deep, or has too many values or other numbers.
    """
    _require_few(content.encode(errors="replace") if isinstance(content, str) else content)
    return _parse(content, _decode_request)


def _parse(content: str | bytes, decode: Callable[[str], Any]) -> Any:
    text = content if isinstance(content, str) else content.decode()
    try:
        value = decode(text)
    except RecursionError:
        raise too_deep() from None
    require_shallow(value, text)
    if "\\ud" in text or "\\uD" in text:  # An escape is the only way to write half a pair.
        (value,) = encodable_json([value])
    return value


def _require_few(content: bytes) -> None:
    """Raise ValueError for more than `MAX_VALUES` values, before any memory is taken for them."""
    if _num_values(content) > MAX_VALUES and _num_values(_STRING.sub(b"", content)) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} values")


def _num_values(content: bytes) -> int:
    """Return at least the number of values outside of strings: each but one follows such a sign."""
    return sum(map(content.count, (b",", b"[", b"{", b":")))


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= len(str(MAX_INTEGER)) + 1 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise ValueError(f"the number {digits:.40} is larger than {MAX_INTEGER}")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits:.40} is not finite")
    return value


_decode_request = json.JSONDecoder(
    parse_int=_integer, parse_float=_finite, parse_constant=_finite
).decode


def require_shallow(value: Any, text: str) -> None:
    """Raise ValueError if the value of the JSON `text` nests deeper than `MAX_DEPTH`."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return
    if any(depth == MAX_DEPTH for depth, _ in enumerate(levels(value))):
        raise too_deep()


def levels(value: Any) -> Iterator[list[Any]]:
    """Yield the lists and objects at each level of a JSON value, the outermost first."""
    inner: Iterable[Any] = [value]
    while level := [each for each in inner if isinstance(each, dict | list)]:
        yield level
        inner = chain.from_iterable(
            each.values() if isinstance(each, dict) else each for each in level
        )


def encodable(text: str) -> str:
    """Return the text with question marks in place of halves of surrogate pairs."""
    return text.encode(errors="replace").decode()


def encodable_json(values: Sequence[Any]) -> list[Any]:
    """Copy JSON values, with halves of surrogate pairs, which UTF-8 cannot encode, as `?`."""
    return json.loads(encodable(json.dumps(list(values), ensure_ascii=False)))


def too_deep() -> ValueError:
    return ValueError(f"it nests more than {MAX_DEPTH} levels deep")
