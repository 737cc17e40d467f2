"""One conversation with an endpoint, which has to be sent as a whole with every request."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openenv_pipe.system.foreign_json import encodable_json
from openenv_pipe.types import Message

_NOT_MADE = "This call was not made."


class Conversation:
    """The messages so far.

    An endpoint wants each tool call answered in a message of the role `tool` that names the call's
    id, and wants no other message in that role. Environments answer calls in their order.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._unanswered: list[str] = []  # ids of the last reply's calls

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append the environment's messages."""
        others = []
        for message in encodable_json(messages):
            if message["role"] == "tool" and self._unanswered:
                self._answer(self._unanswered.pop(0), message["content"])
            elif message["role"] == "tool":  # the call was written in words, and has no id
                others.append({"role": "user", "content": message["content"]})
            else:
                others.append(message)
        for call_id in self._unanswered:
            self._answer(call_id, _NOT_MADE)
        self._unanswered = []
        self.messages += others

    def add_reply(self, reply: Mapping[str, Any]) -> None:
        """Append the endpoint's own reply, as `read_reply` returns it."""
        self.messages.append({"role": "assistant", **reply})
        self._unanswered = [call["id"] for call in reply.get("tool_calls", ())]

    def _answer(self, call_id: str, content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def read_reply(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an endpoint's message to keep: content or refusal, and calls."""
    (message,) = encodable_json([message])
    reply: dict[str, Any] = {"content": message.get("content") or message.get("refusal") or ""}
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if calls:
        reply["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": call["function"].get("arguments") or "{}",
                },
            }
            for call in calls
        ]
    return reply


def reply_text(reply: Mapping[str, Any]) -> str:
    """Return the content, and tool calls in the form in which open models write them."""
    calls = (_call_text(call) for call in reply.get("tool_calls", ()))
    return "\n".join(part for part in (reply["content"], *calls) if part)


def _call_text(call: Mapping[str, Any]) -> str:
    """Invalid JSON in the arguments stays as it is: the adapter tells the model."""
    function = call["function"]
    name = json.dumps(function["name"])
    return f'<tool_call>{{"name": {name}, "arguments": {function["arguments"]}}}</tool_call>'
