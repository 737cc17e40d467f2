"""Read the JSON objects that a model writes into its text, and what it writes in place of JSON.

    [add(a=1, b=2), write(text='it\\'s')]     calls in Python: Llama 3.2 and 4, LFM2, OLMo 3
    {code:<|"|>075001<|"|>,exact:true}        objects of dialects: Gemma 4

Broken JSON (half an object, single quotes, a trailing comma) is never repaired: the model is told
and can learn to write JSON. Repeated keys, infinities, NaN, halves of surrogate pairs and what
nests too deep count as broken too, because receivers read them differently, or not at all. So do
positional arguments and expressions in place of JSON.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from openenv_pipe.system.untrusted_json import MAX_DEPTH, require_shallow, too_deep

START = r'\{\s*["}]'  # Other braces are prose.
MAX_EXCERPT = 60
# A string without an end reaches to the end of the text.
STRING = r'"(?:[^"\\]|\\(?s:.))*+(?:"|\\?\Z)'
# What the decoder does not read if the text ends within it.
_CUT_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity", "e+", "e-", "E+", "E-", ".")
_MAX_CUT = len("-Infinity")
_Item = TypeVar("_Item")
_SPACE = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_NEXT_CALL = re.compile(r"[ \t\r\n]*[^\W\d]")
_NUMBER = re.compile(r"(?a:-?(?:0|[1-9]\d*)(\.\d*)?([eE][+-]?\d+)?)")
_CONSTANTS = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_QUOTED = {quote: re.compile(rf"((?:[^{quote}\\]|\\(?s:.))*+){quote}") for quote in ('"', "'")}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(?s:(.)))")
_ESCAPED = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "\n": "",
    **{each: each for each in "\\/'\""},
}


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
    """Return where an object, which may be broken, ends.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How an object differs from JSON."""

    strings: Mapping[str, str]  # marks around raw strings, the closing one by the opening one
    bare_keys: bool


class LiteralError(ValueError):
    """A text is not a literal."""

    def __init__(self, problem: str, pos: int, *, is_cut: bool) -> None:
        """pos: where it fails. is_cut: only because the text ends."""
        super().__init__(problem)
        self.pos = pos
        self.is_cut = is_cut


class LiteralReader:
    """Reads literals from a position of a text on; `pos` is after what has been read."""

    def __init__(self, text: str, pos: int, dialect: Dialect | None = None) -> None:
        self.pos = pos
        self._text = text
        self._dialect = dialect or Dialect(strings={}, bare_keys=False)

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Read `[f(a=1), g()]`, or calls that only space separates. Raises LiteralError."""
        if self._at("["):
            self.pos += 1
            return self._items("]", self._call)
        calls = []
        while _NEXT_CALL.match(self._text, self.pos):
            calls.append(self._call())
            if self._at(",") or self._at(";"):
                self.pos += 1
        return calls

    def value(self, depth: int = 0) -> Any:
        """Read a value. Raises LiteralError."""
        if depth >= MAX_DEPTH:
            raise self._error(f"it nests more than {MAX_DEPTH} levels deep")
        if self._at("["):
            self.pos += 1
            return self._items("]", lambda: self.value(depth + 1))
        if self._at("{"):
            self.pos += 1
            return self._unique(self._items("}", lambda: self._pair(depth + 1)))
        if (string := self._string()) is not None:
            return string
        if match := _NUMBER.match(self._text, self.pos):
            return self._number(match)
        match = _NAME.match(self._text, self.pos)
        if match and match[0] in _CONSTANTS and match.end() < len(self._text):
            self.pos = match.end()
            return _CONSTANTS[match[0]]
        is_cut = match.end() == len(self._text) if match else None
        raise self._error("it is not a string, number, list or object", is_cut=is_cut)

    def _call(self) -> tuple[str, dict[str, Any]]:
        name = self._name("the name of a function")
        self._expect("(")
        return name, self._unique(self._items(")", self._argument))

    def _argument(self) -> tuple[str, Any]:
        name = self._name("the name of an argument")
        self._expect("=")
        return name, self.value()

    def _pair(self, depth: int) -> tuple[str, Any]:
        self._skip_space()
        key = self._string()
        if key is None:
            if not self._dialect.bare_keys:
                raise self._error("a key is not a string")
            key = self._name("a key")
        self._expect(":")
        return key, self.value(depth)

    def _items(self, close: str, item: Callable[[], _Item]) -> list[_Item]:
        items: list[_Item] = []
        while not self._at(close):
            if items:
                self._expect(",")
            items.append(item())
        self.pos += len(close)
        return items

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise self._error(f"{twice!r:.80} is there more than once", is_cut=False)
        return value

    def _string(self) -> str | None:
        """Read a string; None: there is none."""
        text, pos = self._text, self.pos
        for begin, end in self._dialect.strings.items():
            if text.startswith(begin, pos):
                first = pos + len(begin)
                last = text.find(end, first)
                if last < 0:
                    raise self._error("a string has no end", is_cut=True)
                self.pos = last + len(end)
                return self._encodable(text[first:last])
        quoted = _QUOTED.get(text[pos : pos + 1])
        if quoted is None:
            return None
        match = quoted.match(text, pos + 1)
        if match is None:
            raise self._error("a string has no end", is_cut=True)
        value = _ESCAPE.sub(self._unescaped, match[1])
        self.pos = match.end()
        return self._encodable(value)

    def _encodable(self, value: str) -> str:
        """Return a string. Raises LiteralError if it has halves of surrogate pairs."""
        try:
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            problem = "a string has characters that are not Unicode"
            raise LiteralError(problem, self.pos, is_cut=False) from None

    def _unescaped(self, match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        if code and int(code, 16) <= sys.maxunicode:
            return chr(int(code, 16))
        if match[4] not in _ESCAPED:
            raise self._error(f"{match[0]!r} is not an escape of a string", is_cut=False)
        return _ESCAPED[match[4]]

    def _number(self, match: re.Match[str]) -> int | float:
        if match.end() == len(self._text):
            raise self._error("it ends in a number", is_cut=True)
        is_integer = match[1] is None and match[2] is None
        limit = sys.get_int_max_str_digits()
        if is_integer and limit and len(match[0]) > limit:
            raise self._error(f"a number has {len(match[0])} digits", is_cut=False)
        value = int(match[0]) if is_integer else float(match[0])
        if not math.isfinite(value):
            raise self._error(f"{match[0]:.40} is not a finite number", is_cut=False)
        self.pos = match.end()
        return value

    def _name(self, what: str) -> str:
        self._skip_space()
        match = _NAME.match(self._text, self.pos)
        if match is None:
            raise self._error(f"{what} is missing")
        self.pos = match.end()
        return match[0]

    def _expect(self, mark: str) -> None:
        if not self._at(mark):
            raise self._error(f"{mark!r} is missing")
        self.pos += len(mark)

    def _at(self, mark: str) -> bool:
        self._skip_space()
        return self._text.startswith(mark, self.pos)

    def _skip_space(self) -> None:
        if match := _SPACE.match(self._text, self.pos):
            self.pos = match.end()

    def _error(self, problem: str, *, is_cut: bool | None = None) -> LiteralError:
        """is_cut: None: True if nothing is left of the text."""
        near = self._text[max(0, self.pos - MAX_EXCERPT // 2) : self.pos + MAX_EXCERPT // 2]
        is_cut = self.pos >= len(self._text) if is_cut is None else is_cut
        return LiteralError(f"{problem} near {near!r}", self.pos, is_cut=is_cut)
