"""Conversations with an endpoint that tells no token ids: messages as JSON, packed into ids.

An id is four bytes of that JSON, which is about a token of English text: so `env`'s limits in
tokens mean about what they say. Refused: being trained on. Nothing here was sampled id by id.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from openenv_pipe.types import Message, Tool

_BYTES_PER_ID = 4


class TextChat:
    """What an episode needs of a chat format, for whole messages."""

    def first_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return pack({"messages": list(messages), "tools": list(tools)})

    def following_ids(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """A message ends where it ends, whether it was cut off or not."""
        return pack({"messages": list(messages)})

    def reply_text(self, completion_ids: Sequence[int]) -> str:
        """The content, and calls of tools in the form that open models write them in."""
        reply = unpack(completion_ids)
        calls = (_call_text(call) for call in reply.get("tool_calls", ()))
        return "\n".join(part for part in (reply["content"] or "", *calls) if part)


def pack(value: Mapping[str, Any]) -> list[int]:
    """A JSON object as ids. Halves of surrogate pairs, which JSON can hold, become `?`."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    text += b" " * (-len(text) % _BYTES_PER_ID)
    return list(struct.unpack(f"<{len(text) // _BYTES_PER_ID}I", text))


def unpack(ids: Sequence[int]) -> dict[str, Any]:
    """The inverse of `pack`."""
    return json.loads(struct.pack(f"<{len(ids)}I", *ids))


def _call_text(call: Mapping[str, Any]) -> str:
    """What is broken in the arguments stays broken: the adapter tells the model."""
    function = call["function"]
    name = json.dumps(function["name"])
    return f'<tool_call>{{"name": {name}, "arguments": {function["arguments"]}}}</tool_call>'
