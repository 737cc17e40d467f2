"""The one reader of replies, for adapters, programs and served models.

It goes over a reply once, from left to right. A marked call is

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>    Hermes, Qwen

In replies without marked calls, JSON objects of that form are calls (Llama and others), also with
`parameters` in place of `arguments`. A decoder reads the JSON from its first brace on, so marks in
its strings mark nothing. Thoughts have no calls, and a call without its closing mark is none.
Values are taken as they are written; the environment says whether they fit the tool's schema.

The marks are data (`ReplyFormat`).
"""

import bisect
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from openenv_pipe.models.replies import Call, CallStatus, Reply, without_spans
from openenv_pipe.models.reply_channels import Channels, channel_messages
from openenv_pipe.models.reply_json import START, STRING, JsonObject, object_end, read_object
from openenv_pipe.types import Tool

FORM = '{"name": ..., "arguments": {...}}'


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyFormat:
    """How models mark the parts of their replies."""

    thought: tuple[str, str] = ("<think>", "</think>")
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    channels: Channels | None = None  # around all of it


HERMES = ReplyFormat()
HARMONY = ReplyFormat(  # gpt-oss
    channels=Channels(
        start="<|start|>",
        channel="<|channel|>",
        text="<|message|>",
        ends=("<|end|>", "<|return|>"),
        call_end="<|call|>",
        thoughts="analysis",
    )
)


class ReplyReader:
    """Reads the replies of one model."""

    def __init__(self, form: ReplyFormat = HERMES, *, begins_in_thought: bool = False) -> None:
        """begins_in_thought: the prompt has already opened a thought."""
        self.form = form
        self.begins_in_thought = begins_in_thought
        think, end_think = map(re.escape, form.thought)
        call, end_call = map(re.escape, form.call)
        self.parts = _named(think=think, end_think=end_think, call=call, object=START)
        self.parts_of_call = _named(call=call, end_call=end_call, object=START)
        self.call_marks = _named(call=call, end_call=end_call)
        marks = "|".join((think, end_think, call, end_call))
        self.structure = re.compile(rf"{STRING}|[{{}}]|{marks}")

    def read(self, reply: str, tools: Iterable[Tool] = ()) -> Reply:
        """Read a reply. tools: those that can be called; without any, they are not known."""
        visible, thought, is_thinking = self.without_channels(reply)
        found = _Pass(self, visible, {each["function"]["name"] for each in tools})
        found.run()
        read = Reply(reply)
        read.visible = visible
        read.calls = [call for call in found.calls if call.is_marked] or found.calls
        read.objects = found.objects
        read.is_thinking = found.is_thinking or is_thinking
        thoughts = (thought, *(visible[start:end] for start, end in found.thoughts))
        read.thought = "\n".join(each.strip() for each in thoughts if each.strip())
        read.text = without_spans(visible, [*found.cuts, *(call.span for call in read.made_calls)])
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
                begin = f'{self.form.call[0]}{{"name": "{each.recipient}", "arguments": '
                end = f"}}{self.form.call[1]}" if each.end == channels.call_end else ""
                visible.append(f"{begin}{each.text}{end}")
            else:
                visible.append(each.text)
        is_thinking = bool(messages) and messages[-1].is_thought
        return "\n".join(visible), "\n".join(thoughts), is_thinking


class _Pass:
    """One pass over a text, from left to right."""

    def __init__(self, reader: ReplyReader, text: str, names: Collection[str]) -> None:
        """names: of the tools; empty: they are not known."""
        self.calls: list[Call] = []
        self.objects: list[JsonObject] = []
        self.thoughts: list[tuple[int, int]] = []
        self.cuts: list[tuple[int, int]] = []  # the thoughts with their marks
        self.is_thinking = False  # at the end
        self._reader = reader
        self._text = text
        self._names = names
        self._call_marks: list[int] | None = None  # where all of them begin

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
                    self.calls, self.objects = [], []
                    self.thoughts, self.cuts = [(0, start)], [(0, pos)]
                case "call":
                    pos = self._read_marked_call(start, pos)
                case _:
                    pos = self._read_bare_object(start)

    def _read_thought(self, start: int, pos: int) -> int:
        """Read a thought whose mark begins at `start`, and whose text begins at `pos`."""
        mark = self._reader.form.thought[1]
        end = self._text.find(mark, pos)
        self.is_thinking = end < 0
        end, after = (end, end + len(mark)) if end >= 0 else (len(self._text),) * 2
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

    def _read_marked_call(self, start: int, pos: int) -> int:
        objects: list[JsonObject] = []
        part = self._reader.parts_of_call.search(self._text, pos)
        while part and part.lastgroup == "object":
            read = self._object_in_call(part.start())
            objects.append(read)
            # Braces behind a broken object may be its own.
            is_broken = read.value is None
            following = self._reader.call_marks if is_broken else self._reader.parts_of_call
            part = following.search(self._text, read.end)
        self.objects += objects
        is_closed = part is not None and part.lastgroup == "end_call"
        end = len(self._text) if part is None else part.end() if is_closed else part.start()
        broken = next((each for each in objects if each.value is None), None)
        call = _name_and_arguments(objects[0].value) if len(objects) == 1 else None
        if broken:
            is_cut = part is None and broken.is_cut
            self._add_broken(broken.problem, is_cut, (start, end), is_marked=True)
        elif not is_closed:
            problem = f"it is not closed by {self._reader.form.call[1]}"
            self._add_broken(problem, part is None, (start, end), is_marked=True)
        elif call is None:
            problem = f"it is not one object of the form {FORM}"
            self._add_broken(problem, False, (start, end), is_marked=True)
        else:
            self._add_call(*call, (start, end), is_marked=True)
        return end

    def _object_in_call(self, start: int) -> JsonObject:
        """Read the object at `start`, up to the first mark that is not in one of its strings.

        While a mark cuts the object off, twice as many marks are taken for parts of it, so that
        the work grows with the length of the object.
        """
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

    def _add_call(
        self, name: str, arguments: dict[str, Any], span: tuple[int, int], *, is_marked: bool
    ) -> None:
        is_known = not self._names or name in self._names
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
        self, problem: str, is_cut: bool, span: tuple[int, int], *, is_marked: bool
    ) -> None:
        status = CallStatus.TRUNCATED if is_cut else CallStatus.MALFORMED
        self.calls.append(Call(status=status, problem=problem, is_marked=is_marked, span=span))


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


def _named(**patterns: str) -> re.Pattern[str]:
    """Compile a choice between patterns, each a group of this name."""
    return re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in patterns.items()))


def reader_for(special_tokens: Collection[str], begun: str) -> ReplyReader:
    """Return the reader for a model.

    begun: what the chat template writes behind the last message, where the reply begins.
    """
    assert HARMONY.channels is not None
    form = HARMONY if HARMONY.channels.channel in special_tokens else HERMES
    return ReplyReader(form, begins_in_thought=ReplyReader(form).read(begun).is_thinking)


PLAIN_READER = ReplyReader()  # where the model's own format is not known


def as_reply(reply: str) -> Reply:
    """Return a reply that has been read, or read it in the plain format."""
    return reply if isinstance(reply, Reply) else PLAIN_READER.read(reply)
