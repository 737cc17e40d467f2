"""The one reader of replies, for adapters, programs and served models.

It goes over a reply once, from left to right. How calls and thoughts are marked is data
(`formats.py`). Each reader also reads the calls that tools in words ask for:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>    Hermes, Qwen

In replies without marked calls, JSON objects of that form are calls (Llama and others), also with
`parameters` in place of `arguments`. A decoder reads the content of a call from its opening mark
on, so marks in its strings mark nothing. Thoughts have no calls, and a call needs its closing
mark. Values are taken as they are written, and cast by the tool's schema where the format
writes all of them as text; the environment says whether they fit.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from openenv_pipe.models.replies.calls import NOT_OF_THE_FORM, BrokenCallError, CallContents
from openenv_pipe.models.replies.channels import channel_messages
from openenv_pipe.models.replies.formats import (
    HERMES,
    Compile,
    ReplyFormat,
    format_of,
    unnamed,
    within_limit,
)
from openenv_pipe.models.replies.reply import Call, CallStatus, Reply, without_spans
from openenv_pipe.models.replies.values import START, STRING, object_end, read_object
from openenv_pipe.system.patterns import SlowPatternError
from openenv_pipe.types import Tool

_LISTED_NAME = re.compile(r"\[?\s*([^\W\d][\w.-]*)")
_LINE_END = re.compile(r"(?m:[ \t]*(?:$|<))")


class ReplyReader:
    def __init__(self, form: ReplyFormat = HERMES, *, begins_in_thought: bool = False) -> None:
        """begins_in_thought: the prompt has already opened a thought."""
        self.form = form
        self.begins_in_thought = begins_in_thought
        self.turn_end = ""  # the text of the token that ends a turn, which replies are read without
        self.calls = [*form.calls, *(HERMES.calls if form is not HERMES else ())]
        # Forms without marks at their beginning are calls only if there is such a tool.
        self.bare = {index for index, call in enumerate(self.calls) if call.opening.match("[a(")}
        # The channels have been taken apart: in what is visible, these marks are plain text.
        think, end_think = form.thought if form.channels is None else ("", "")
        closings = [call.closing.pattern for call in self.calls if call.closing]
        openings = [unnamed(call.opening.pattern) for call in self.calls]
        tags = [call.tags.closing.pattern for call in self.calls if call.tags]
        mark = re.escape(form.call_mark)
        self.end_of_thought = form.compile(form.thought[1])
        self.parts = _named(
            form.compile,
            think=think,
            end_think=end_think,
            **{f"call{index}": each for index, each in enumerate(openings)},
            mark=mark,
            object=START,
            stray="|".join(tags),
            block=re.escape(form.block[0]) if form.block else "",
            end_block=re.escape(form.block[1]) if form.block else "",
        )
        marks = [each for index, each in enumerate(openings) if index not in self.bare]
        self.call_marks = _named(
            form.compile,
            end="|".join(closings),
            begin="|".join([*marks, *([mark] if mark else [])]),
        )
        patterns = (think, end_think, *closings, *marks)
        every = "|".join(f"(?:{each})" for each in patterns if each)
        self.structure = form.compile(rf"{STRING}|[{{}}]|{every}")
        # Of literals, with all kinds of strings.
        dialects = [
            pair for call in self.calls if call.dialect for pair in call.dialect.strings.items()
        ]
        strings = [f"{re.escape(begin)}.*?(?:{re.escape(end)}|\\Z)" for begin, end in dialects]
        strings += [STRING, r"'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+(?:'|\\?(?=\n|\Z))"]
        self.outside_strings = _named(
            form.compile, string="|".join(strings), mark=self.call_marks.pattern
        )

    def read(self, reply: str, tools: Iterable[Tool] = ()) -> Reply:
        """Read a reply. tools: those that can be called; without any, they are not known."""
        visible, thought, is_thinking = self.without_channels(reply)
        found = _Pass(self, visible, tools)
        try:
            with within_limit():
                found.run()
        except SlowPatternError as error:
            whole = (0, len(visible))
            found = _Pass(self, visible, tools)
            found._add_broken(str(error), False, whole)
        read = Reply(reply)
        read.visible = visible
        read.calls = [call for call in found.calls if call.is_marked] or found.calls
        read.objects = found.objects
        read.is_thinking = found.is_thinking or is_thinking
        thoughts = (thought, *(visible[start:end] for start, end in found.thoughts))
        read.thought = "\n".join(each.strip() for each in thoughts if each.strip())
        text = without_spans(visible, [*found.cuts, *(call.span for call in read.made_calls)])
        for mark in self.form.content_marks:
            text = text.replace(mark, "")
        read.text = text.strip()
        return read

    def without_channels(self, reply: str) -> tuple[str, str, bool]:
        """Return what is visible of a reply, its thoughts, and whether it ends in one.

        Calls become marked calls. In formats without channels, all is visible.
        """
        channels = self.form.channels
        if channels is None:
            return reply, "", False
        messages = channel_messages(reply, channels, begins_in_thought=self.begins_in_thought)
        visible, thoughts = [], []
        for each in messages:
            if each.is_thought:
                thoughts.append(each.text)
            elif each.recipient:
                name = json.dumps(each.recipient, ensure_ascii=False)
                begin = f'<tool_call>{{"name": {name}, "arguments": '
                end = "}</tool_call>" if each.end == channels.call_end else ""
                visible.append(f"{begin}{_as_one_value(each.text)}{end}")
            elif each.end == channels.call_end:  # It does not say what it calls.
                visible.append(f"<tool_call>{_as_one_value(each.text)}</tool_call>")
            else:
                visible.append(each.text)
        is_thinking = bool(messages) and messages[-1].is_thought
        return "\n".join(visible), "\n".join(thoughts), is_thinking


_Function = tuple[str, dict[str, Any]]


class _Pass:
    """One pass over a text, from left to right."""

    def __init__(self, reader: ReplyReader, text: str, tools: Iterable[Tool]) -> None:
        """tools: empty: they are not known."""
        self.calls: list[Call] = []
        self.thoughts: list[tuple[int, int]] = []
        self.cuts: list[tuple[int, int]] = []  # the thoughts with their marks
        self.is_thinking = False  # at the end
        self._reader = reader
        self._text = text
        self._contents = CallContents(reader, text, tools)
        self.objects = self._contents.objects
        self._tagged: list[int] = []  # the calls whose arguments are between tags
        self._block: tuple[int, int] | None = None  # that is open: its first call, and its begin

    def run(self) -> None:
        pos = 0
        if self._reader.begins_in_thought and self._reader.form.channels is None:
            pos = self._read_thought(0, 0)
        while match := self._reader.parts.search(self._text, pos):
            start, pos = match.span()
            match match.lastgroup:
                case "think":
                    pos = self._read_thought(start, pos)
                case "end_think":
                    # The prompt had opened the thought, or the thought names its closing mark.
                    self.objects.clear()
                    self.calls, self._tagged, self._block = [], [], None
                    self.thoughts, self.cuts = [(0, start)], [(0, pos)]
                case "object":
                    pos = self._read_bare_object(start)
                case "mark":
                    pos, is_cut = self._contents.next_mark(pos)
                    self._add_broken("it is not of the form of calls", is_cut, (start, pos))
                case "stray":
                    problem = "follows it, which may be part of the text of its last argument"
                    self._break(self._tagged, CallStatus.MALFORMED, f"{match[0]} {problem}")
                    self._tagged = []
                case "block":
                    self._block = (len(self.calls), start)
                case "end_block":
                    self._close_block(pos)
                case call:
                    pos = self._read_call(int(str(call).removeprefix("call")), start)
        if self._block and self._reader.form.block:
            self._break(
                range(self._block[0], len(self.calls)),
                CallStatus.TRUNCATED,
                f"it is not closed by {self._reader.form.block[1]}",
            )

    def _close_block(self, end: int) -> None:
        """End a block of calls. Its marks belong to its first and its last call."""
        if self._block and self.calls[self._block[0] :]:
            first, start = self._block
            call = self.calls[first]
            self.calls[first] = replace(call, span=(start, call.span[1]))
            call = self.calls[-1]
            self.calls[-1] = replace(call, span=(call.span[0], end))
        self._block = None

    def _read_thought(self, start: int, pos: int) -> int:
        """Read a thought whose mark begins at `start`, and whose text begins at `pos`."""
        match = self._reader.end_of_thought.search(self._text, pos)
        self.is_thinking = match is None
        end, after = match.span() if match else (len(self._text),) * 2
        self.thoughts.append((pos, end))
        self.cuts.append((start, after))
        return after

    def _read_bare_object(self, start: int) -> int:
        end = object_end(self._text, start, len(self._text), self._reader.structure)
        read = read_object(self._text, start, end)
        self.objects.append(read)
        if read.value is None:
            is_cut = read.is_cut and read.end == len(self._text)
            self._add_broken(read.problem, is_cut, (start, read.end), is_marked=False)
        elif call := _name_and_arguments(read.value):
            self._add_call(*call, (start, read.end), is_marked=False)
        return read.end

    def _read_call(self, index: int, start: int) -> int:
        """Read what begins with the opening mark of a form."""
        form, is_marked = self._reader.calls[index], index not in self._reader.bare
        match = form.opening.match(self._text, start)
        assert match is not None
        captures = {key: value for key, value in match.groupdict().items() if value is not None}
        try:
            found, end = self._contents.content(form, match.end(), captures)
            end = self._contents.closed(form, end)
            functions = [(_name_and_arguments(each), last) for each, last in found]
            if any(each is None for each, _ in functions):
                raise BrokenCallError(NOT_OF_THE_FORM, end, is_cut=False)
        except BrokenCallError as error:
            listed = _LISTED_NAME.match(self._text, match.end())
            names_tool = listed is not None and listed[1] in self._contents.tools
            if not is_marked and not names_tool:
                return match.end() + 1
            self._add_broken(str(error), error.is_cut, (start, error.resume), is_marked=is_marked)
            return error.resume
        if not is_marked and not self._is_alone(functions, end):
            return match.end() + 1
        for number, (function, last) in enumerate(functions, start=1):
            if function:
                last = end if number == len(functions) else last
                self._add_call(*function, (start, last), is_marked=is_marked)
                start = last
        if form.tags:
            self._tagged.append(len(self.calls) - 1)
        return end

    def _add_call(
        self, name: str, arguments: dict[str, Any], span: tuple[int, int], *, is_marked: bool
    ) -> None:
        is_known = not self._contents.tools or name in self._contents.tools
        self.calls.append(
            Call(
                status=CallStatus.OK if is_known else CallStatus.UNKNOWN_TOOL,
                name=name,
                arguments=arguments,
                is_marked=is_marked,
                span=span,
            )
        )

    def _add_broken(
        self, problem: str, is_cut: bool, span: tuple[int, int], *, is_marked: bool = True
    ) -> None:
        status = CallStatus.TRUNCATED if is_cut else CallStatus.MALFORMED
        self.calls.append(Call(status=status, problem=problem, is_marked=is_marked, span=span))

    def _break(self, numbers: Iterable[int], status: CallStatus, problem: str) -> None:
        """Mark calls that have been read as broken."""
        for number in numbers:
            if not self.calls[number].is_broken:
                call = self.calls[number]
                self.calls[number] = replace(call, status=status, problem=problem)

    def _is_alone(self, functions: Sequence[tuple[_Function | None, int]], end: int) -> bool:
        """Whether calls without marks end their line, and there are such tools."""
        names = {function[0] for function, _ in functions if function}
        is_known = not self._contents.tools or not names.isdisjoint(self._contents.tools)
        return is_known and _LINE_END.match(self._text, end) is not None


def _as_one_value(text: str) -> str:
    """Return the arguments of a call, as a string if something in them could end the call."""
    try:
        end = json.JSONDecoder().raw_decode(text.lstrip())[1]
        is_one = end == len(text.strip())
    except (ValueError, RecursionError):  # Broken arguments stay as they are.
        is_one = "tool_call>" not in text
    return text if is_one else json.dumps(text, ensure_ascii=False)


def _name_and_arguments(value: dict[str, Any] | None) -> tuple[str, dict[str, Any]] | None:
    """Return what an object calls; None if it is not of the form of a call.

    Arguments may also be the text of a JSON object, as in OpenAI's requests.
    """
    name = value.get("name") if value else None
    arguments = value.get("arguments", value.get("parameters")) if value else None
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        text = arguments.strip()
        read = read_object(text, 0, len(text))
        arguments = read.value if read.end == len(text) else None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _named(compile: Compile, **patterns: str) -> re.Pattern[str]:
    """Compile a choice between patterns, each a group of this name. Empty ones are left out."""
    groups = (f"(?P<{name}>{pattern})" for name, pattern in patterns.items() if pattern)
    choices = "|".join(groups)
    return compile(choices)


def reader_for(
    special_tokens: Collection[str], begun: str, chat_template: str, response_template: Any
) -> ReplyReader:
    """Return the reader for a model.

    begun: what the chat template writes after the last message, where the reply begins.
    response_template: of the tokenizer's configuration; None: it has none.
    """
    form = format_of(special_tokens, chat_template, response_template)
    return ReplyReader(form, begins_in_thought=ReplyReader(form).read(begun).is_thinking)


PLAIN_READER = ReplyReader()  # where the model's own format is not known


def as_reply(reply: str) -> Reply:
    """Return a reply that has been read, or read it in the plain format."""
    return reply if isinstance(reply, Reply) else PLAIN_READER.read(reply)
