"""Read what stands between the marks of a call, and find where to read on if the call is broken.

Arguments that are written as text are cast by the tool's schema.
"""

import bisect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from openenv_pipe.models.replies.formats import CallForm, resolved
from openenv_pipe.models.replies.values import (
    START,
    JsonObject,
    LiteralError,
    LiteralReader,
    object_end,
    read_object,
)
from openenv_pipe.types import Tool

if TYPE_CHECKING:
    from openenv_pipe.models.replies.reader import ReplyReader

FORM = '{"name": ..., "arguments": {...}}'
NOT_OF_THE_FORM = f"it is not one object of the form {FORM}"
_LEAD = re.compile(r"\s*(?:```\w*\s*)?")
_TAIL = re.compile(r"\s*(?:```)?\s*")
_COMMA = re.compile(r"\s*,\s*")
_BRACKET = re.compile(r"\s*\]")
_SPACE = re.compile(r"\s*")
_STRAY = re.compile(r"\s*</[^<>\s]+>\s*|\s*")  # a mark that a response_template leaves out
_OBJECT = re.compile(START)
_QUOTED = re.compile(r'"(?:[^"\\]|\\(?s:.))*+"')
_NUMBER = re.compile(r"(?a:-?(?:0|[1-9]\d{0,400})(?:\.\d+)?(?:[eE][+-]?\d{1,4})?)")
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_NULLS = ("null", "None")
_MAX_END = 64  # characters of a reply that the turn's end may complete to a closing mark


class BrokenCallError(Exception):
    """What begins as a call is not one."""

    def __init__(self, problem: str, resume: int, *, is_cut: bool) -> None:
        """resume: where reading goes on."""
        super().__init__(problem)
        self.resume = resume
        self.is_cut = is_cut


class CallContents:
    def __init__(self, reader: "ReplyReader", text: str, tools: Iterable[Tool]) -> None:
        self.objects: list[JsonObject] = []  # that have been read
        self.tools = {each["function"]["name"]: each for each in tools}
        self._reader = reader
        self._text = text
        self._call_marks: list[int] | None = None  # where all of them begin

    def content(
        self, form: CallForm, pos: int, captures: Mapping[str, str]
    ) -> tuple[list[tuple[Any, int]], int]:
        """Return the calls of a content, each with where it ends, and where the content ends.

        Raises BrokenCallError.
        """
        if form.tags:
            arguments, pos = self._tagged_arguments(form, pos, captures.get("name", ""))
            values = [(arguments, pos)]
        elif form.content == "python-call-list" or form.dialect:
            values, pos = self._literals(form, pos)
        else:
            values, pos = self._json_values(form, pos)
        scopes: list[Mapping[str, Any]] = [
            {**captures, **value} if form.is_list else {**captures, "content": value}
            for value, _ in values
        ]
        functions = [resolved(form.function, scope) for scope in scopes]
        return [(each, end) for each, (_, end) in zip(functions, values, strict=True)], pos

    def _json_values(self, form: CallForm, pos: int) -> tuple[list[tuple[Any, int]], int]:
        """Read a JSON object, a string of one, or a list of objects. Raises BrokenCallError."""
        text, values = self._text, list[tuple[Any, int]]()
        pos = _end(_LEAD, text, pos)
        if form.is_list and text[pos : pos + 1] == "[":
            pos = _end(_SPACE, text, pos + 1)
        elif form.is_list:
            raise self._not_of_the_form(pos)
        while text[pos : pos + 1] == '"' or _OBJECT.match(text, pos):
            read = self._object(pos)
            self.objects.append(read)
            if read.value is None:
                mark = self._reader.call_marks.search(text, read.end)
                resume = _resume(text, mark)
                raise BrokenCallError(read.problem, resume, is_cut=mark is None and read.is_cut)
            values.append((read.value, pos := read.end))
            comma = _COMMA.match(text, pos)
            if not form.is_list or comma is None:
                break
            pos = comma.end()
        if not values:
            raise self._not_of_the_form(pos)
        if form.is_list:
            bracket = _BRACKET.match(text, pos)
            if bracket is None:
                raise self._not_closed("]", pos)
            pos = bracket.end()
        return values, pos

    def _literals(self, form: CallForm, pos: int) -> tuple[list[tuple[Any, int]], int]:
        """Raises BrokenCallError."""
        reader = LiteralReader(self._text, pos, form.dialect)
        try:
            if form.content == "python-call-list":
                calls = reader.calls()
                values = [({"name": name, "arguments": each}, pos) for name, each in calls]
            else:
                values = [(reader.value(), reader.pos)]
        except LiteralError as error:
            resume = len(self._text) if error.is_cut else self.next_mark(error.pos)[0]
            raise BrokenCallError(str(error), resume, is_cut=error.is_cut) from None
        if not values:
            raise self._not_of_the_form(reader.pos)
        return values, reader.pos

    def _tagged_arguments(self, form: CallForm, pos: int, name: str) -> tuple[dict[str, Any], int]:
        """Read arguments between tags. Raises BrokenCallError."""
        assert form.tags is not None
        text, types = self._text, properties_of(self.tools[name]) if name in self.tools else {}
        arguments, problem = dict[str, Any](), ""
        while match := form.tags.opening.match(text, pos := _end(_SPACE, text, pos)):
            key, first = match["key"].strip(), match.end()
            last, pos = self._end_of_value(form, first, key)
            value = text[first:last]
            if form.tags.has_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            if key in arguments:
                problem = f"the argument {key!r:.80} is there more than once"
            if form.opening.search(value):
                problem = f"the text of {key!r:.80} has the opening mark of a call"
            if self._holds_an_end(form, value):
                problem = f"the text of {key!r:.80} has what ends it or begins another call"
            arguments[key] = cast(value, types.get(key, ()))
        if problem:
            raise BrokenCallError(problem, self.closed(form, pos), is_cut=False)
        return arguments, pos

    def _holds_an_end(self, form: CallForm, value: str) -> bool:
        """Whether a value has its closing tag in it, and then a call's end or another argument."""
        assert form.tags is not None
        closing, opening = form.tags.closing, form.tags.opening
        for match in closing.finditer(value):
            after = _end(_SPACE, value, match.end())
            if opening.search(value, after):
                return True
            if value.startswith("</", after) and not closing.match(value, after):
                return True
        return False

    def _end_of_value(self, form: CallForm, first: int, key: str) -> tuple[int, int]:
        """Return where an argument ends, without and with its closing tag.

        It ends at a tag that another argument or the end of the call follows.

        Raises BrokenCallError.
        """
        assert form.tags is not None
        for match in form.tags.closing.finditer(self._text, first):
            after = _end(_SPACE, self._text, match.end())
            if form.tags.opening.match(self._text, after) or self._end_of_call(form, after):
                return match.start(), match.end()
        is_cut = form.closing is None or form.closing.search(self._text, first) is None
        problem = f"the argument {key!r:.80} or the call behind it has no closing mark"
        raise BrokenCallError(problem, len(self._text), is_cut=is_cut)

    def closed(self, form: CallForm, pos: int) -> int:
        """Return where a call ends whose content ends at `pos`. Raises BrokenCallError."""
        if form.closing is None:
            return pos
        if end := self._end_of_call(form, _end(_TAIL, self._text, pos)):
            return end
        raise self._not_closed(form.end_mark, pos)

    def _end_of_call(self, form: CallForm, pos: int) -> int | None:
        """Return where the closing mark ends that is at `pos`, or follows another tag."""
        if form.closing is None:
            return pos
        stray = _end(_STRAY, self._text, pos)
        if form.tags and form.tags.closing.search(self._text, pos, stray):
            stray = pos  # It closes an argument: the mark before it is part of the text.
        for begin in (pos, stray):
            if match := form.closing.match(self._text, begin):
                return match.end()
            # Some closing marks have the end of the turn in them.
            rest = self._text[begin : begin + _MAX_END]
            if (
                len(self._text) - begin < _MAX_END
                and self._reader.turn_end
                and (form.closing.fullmatch(rest + self._reader.turn_end))
            ):
                return len(self._text)
        return None

    def _not_closed(self, mark: str, pos: int) -> BrokenCallError:
        match = self._next(pos)
        if match is not None and match["end"] is not None:
            return self._not_of_the_form(pos)
        resume = len(self._text) if match is None else match.start()
        return BrokenCallError(f"it is not closed by {mark}", resume, is_cut=match is None)

    def _not_of_the_form(self, pos: int) -> BrokenCallError:
        resume, is_cut = self.next_mark(pos)
        problem = "it is not closed" if is_cut else NOT_OF_THE_FORM
        return BrokenCallError(problem, resume, is_cut=is_cut)

    def _object(self, start: int) -> JsonObject:
        """Read the object at `start`, up to the first mark that is not in one of its strings.

        While a mark cuts the object off, twice as many marks are taken for parts of it, so that
        the work grows with the length of the object.
        """
        if self._text[start] == '"':
            return _quoted_object(self._text, start)
        if self._call_marks is None:
            marks = self._reader.call_marks.finditer(self._text)
            self._call_marks = [mark.start() for mark in marks]
        first, num_marks = bisect.bisect(self._call_marks, start), 1
        while True:
            last = first + num_marks - 1
            is_whole = last >= len(self._call_marks)
            end = len(self._text) if is_whole else self._call_marks[last]
            object_ends = object_end(self._text, start, end, self._reader.structure)
            read = read_object(self._text, start, object_ends)
            if is_whole or object_ends < end or not read.is_cut:
                return read
            num_marks *= 2

    def next_mark(self, pos: int) -> tuple[int, bool]:
        """Return where to read on after a broken call, and whether the text ends before a mark."""
        mark = self._next(pos)
        return _resume(self._text, mark), mark is None

    def _next(self, pos: int) -> re.Match[str] | None:
        """Return the next mark of a call that is in no string."""
        marks = self._reader.outside_strings.finditer(self._text, pos)
        return next((each for each in marks if each["mark"] is not None), None)


def _resume(text: str, mark: re.Match[str] | None) -> int:
    """Return the position after a closing mark, or before an opening one."""
    if mark is None:
        return len(text)
    return mark.start() if mark["end"] is None else mark.end()


def _end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    """Return where a pattern ends that matches anywhere."""
    match = pattern.match(text, pos)
    assert match is not None
    return match.end()


def _quoted_object(text: str, start: int) -> JsonObject:
    """Read an object that is written as a JSON string, as in OpenAI's requests."""
    match = _QUOTED.match(text, start)
    if match is None:
        return JsonObject(problem="a string has no end", is_cut=True, end=len(text))
    try:
        inner = json.loads(match[0]).strip()
    except ValueError as error:
        return JsonObject(problem=f"the JSON is broken: {error}", end=match.end())
    read = read_object(inner, 0, len(inner)) if inner.startswith("{") else JsonObject()
    if read.value is None or read.end != len(inner):
        return JsonObject(problem="the string is not one JSON object", end=match.end())
    return replace(read, end=match.end())


def properties_of(tool: Tool) -> Mapping[str, tuple[str, ...]]:
    """Return the JSON types of a tool's parameters, by name, in the order of the schema."""
    schema = tool["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {
        key: tuple(dict.fromkeys(_types(each, schema, set()))) for key, each in properties.items()
    }


def _types(schema: Any, root: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """Yield the types that a schema names.

    seen: the schemas before it, by identity: references can lead back to them
    """
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else _listed(declared)
    yield from (each for each in names if isinstance(each, str))
    if schema.get("nullable"):
        yield "null"
    for choice in ("anyOf", "oneOf", "allOf"):
        for each in _listed(schema.get(choice)):
            yield from _types(each, root, seen)
    yield from map(_type_of, _listed(schema.get("enum")))
    if "const" in schema:
        yield _type_of(schema["const"])
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for key in reference[2:].split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        yield from _types(found, root, seen)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return names.get(type(value), "array" if isinstance(value, list) else "object")


def cast(text: str, types: tuple[str, ...]) -> Any:
    """Parse a text as the first of `types` that fits, null before all others; else return the text.

    A text that looks like a number stays text if the schema says so, or says nothing.
    """
    word = text.strip()
    if "null" in types and word in _NULLS:
        return None
    for each in types:
        if each == "string":
            return text
        if each == "boolean" and word in _WORDS:
            return _WORDS[word]
        if each in ("integer", "number") and _NUMBER.fullmatch(word):
            value = json.loads(word)
            if each == "integer" and isinstance(value, float) and value.is_integer():
                return int(value)
            if isinstance(value, int) or (each == "number" and abs(value) < float("inf")):
                return value
        if each in ("object", "array") and word[:1] == ("{" if each == "object" else "["):
            read = read_object(f'{{"value":{word}}}', 0, len(word) + 10)
            if read.value and len(read.value) == 1 and read.end == len(word) + 10:
                return read.value["value"]
    return text
