"""What a model's reply consists of: thoughts, text, and tool calls with a status for each."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from openenv_pipe.models.replies.values import JsonObject

_EMPTY_FENCE = re.compile(r"```\w*\s*```")  # what is left of one around a call


class CallStatus(StrEnum):
    """Whether something that begins as a tool call is one."""

    OK = "ok"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"  # the reply ends before the call does
    UNKNOWN_TOOL = "unknown_tool"  # the tools are known, and none has this name


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A tool call in a reply, or what was to become one."""

    status: CallStatus
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""  # why it is malformed or truncated
    is_marked: bool  # False: it is JSON without marks around it
    span: tuple[int, int]  # in `Reply.visible`, with its marks

    @property
    def is_broken(self) -> bool:
        return self.status in (CallStatus.MALFORMED, CallStatus.TRUNCATED)

    @property
    def is_made(self) -> bool:
        """Whether it is to be made. The environment answers marked calls of unknown tools."""
        is_unknown = self.status is CallStatus.UNKNOWN_TOOL
        return self.status is CallStatus.OK or (is_unknown and self.is_marked)


class Reply(str):
    """A reply as the model wrote it, with what a `ReplyReader` has found in it.

    It is the text itself, so that adapters which only search it need nothing else.
    """

    __slots__ = ("calls", "is_thinking", "objects", "text", "thought", "visible")

    visible: str  # the reply itself; of a reply with channels, what is not a thought
    thought: str
    text: str  # what is visible, without thoughts and without calls that are made
    calls: Sequence[Call]
    objects: Sequence[JsonObject]  # outside of thoughts, those of calls included
    is_thinking: bool  # it ends inside a thought

    @property
    def made_calls(self) -> list[Call]:
        return [call for call in self.calls if call.is_made]

    @property
    def content(self) -> str:
        """What is visible without the calls that are made, for messages that keep them apart."""
        rest = without_spans(self.visible, [call.span for call in self.made_calls])
        rest = _EMPTY_FENCE.sub("", rest).strip()
        return rest if any(map(str.isalnum, rest)) else ""


def without_spans(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Return a text without the given spans, which do not overlap."""
    kept, last = [], 0
    for start, end in sorted(spans):
        kept.append(text[last:start])
        last = end
    return "".join((*kept, text[last:])).strip()
