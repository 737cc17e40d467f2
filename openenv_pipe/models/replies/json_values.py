"""Read the JSON objects that a model writes into its text.

Broken JSON (half an object, single quotes, a trailing comma) is never repaired: the model is told
and can learn to write JSON. Repeated keys, infinities, NaN, halves of surrogate pairs and what
nests too deep count as broken too, because receivers read them differently, or not at all.
"""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from openenv_pipe.system.untrusted_json import require_shallow, too_deep

START = r'\{\s*["}]'  # Other braces are prose.
MAX_EXCERPT = 60
# A string without an end reaches to the end of the text.
STRING = r'"(?:[^"\\]|\\(?s:.))*+(?:"|\\?\Z)'
# What the decoder does not read if the text ends within it.
_CUT_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity", "e+", "e-", "E+", "E-", ".")
_MAX_CUT = len("-Infinity")


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonObject:
    """An object in a text, or what is broken about it."""

    value: dict[str, Any] | None = None  # None: it is broken
    problem: str = ""
    is_cut: bool = False  # the text ends before the object does
    end: int = 0  # in the text; of a broken object, the end of what was given to read


def read_object(text: str, start: int, end: int) -> JsonObject:
    """Read the object that begins at `start` and does not reach beyond `end`.

    The work grows with `end - start`, not with the length of the text.
    """
    part = text[start:end].rstrip()
    faults: list[str] = []
    try:
        value, length = _decoder(faults).raw_decode(part)
        require_shallow(value, part)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        first = max(0, error.pos - MAX_EXCERPT // 2)
        near = part[first : first + MAX_EXCERPT]
        problem = f"the JSON is broken: {error.msg} near {near!r}"
        return JsonObject(problem=problem, is_cut=_is_cut(part, error), end=end)
    except UnicodeEncodeError:
        faults.append("it has characters that are not Unicode")
    except RecursionError:
        faults.append(str(too_deep()))
    except ValueError as error:
        faults.append(str(error))
    if faults:
        return JsonObject(problem=f"the JSON cannot be read: {faults[0]}", end=end)
    return JsonObject(value=value, end=start + length)


def object_end(text: str, start: int, end: int, structure: re.Pattern[str]) -> int:
    """Return where an object ends that may be broken.

    It ends where as many braces are closed as opened, or before a mark outside of its strings, or
    at `end`.

    structure: matches `STRING`, braces, and marks.
    """
    depth = 0
    for match in structure.finditer(text, start, end):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.end()
        elif not match[0].startswith('"'):
            return match.start()
    return end


def _decoder(faults: list[str]) -> json.JSONDecoder:
    """Return a decoder that notes faults and reads on."""

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            faults.append(f"{text:.40} is not a number that JSON can hold")
        return value

    def integer(text: str) -> int:
        limit = sys.get_int_max_str_digits()
        if limit and len(text) > limit:
            faults.append(f"a number has {len(text)} digits")
            return 0
        return int(text)

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            faults.append(f"the key {counts.most_common(1)[0][0]!r:.80} is there more than once")
        return value

    return json.JSONDecoder(
        parse_float=number,
        parse_int=integer,
        parse_constant=number,
        object_pairs_hook=without_repeats,
    )


def _is_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Return whether the JSON is broken only because the text ends."""
    if error.msg.startswith("Unterminated string"):
        return True
    rest = text[error.pos : error.pos + _MAX_CUT + 1]
    if error.msg.startswith("Invalid \\u"):
        return len(rest) < len("u0000")
    return any(word.startswith(rest) for word in _CUT_WORDS)  # also where nothing is left
