"""The messages of an episode as an endpoint wants them, and its reply."""

import base64
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from openenv_pipe.models.chat.messages import next_call
from openenv_pipe.models.replies.reader import PLAIN_READER
from openenv_pipe.system.untrusted_json import encodable_json
from openenv_pipe.types import Image, Message

_NOT_MADE = "This call was not made."


def endpoint_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return an episode's messages for an endpoint.

    An endpoint wants each tool call answered in a message of the role `tool` that names the call's
    id, and wants no other message in that role. Environments answer calls in their order. Images
    may only be in a user's message: those of a tool's answer follow it in such a message.
    """
    conversation = _Conversation()
    for is_reply, some in groupby(messages, lambda message: message["role"] == "assistant"):
        if is_reply:
            for reply in some:
                conversation.add_reply(reply)
        else:
            conversation.add_messages(list(some))
    return conversation.messages


class _Conversation:
    """The messages that `endpoint_messages` has converted so far."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._unanswered: dict[int, str] = {}  # ids of the last reply's made calls, by their place
        self._not_made: list[str] = []  # ids of its other calls

    def add_messages(self, messages: Sequence[Message]) -> None:
        others = []
        for given in messages:
            images: Mapping[str, Image] = given.get("images", {})
            texts = {name: value for name, value in given.items() if name != "images"}
            (message,) = encodable_json([texts])
            if message["role"] == "tool" and self._unanswered:
                call_id = next_call(self._unanswered, message)
                self._answer(call_id, message["content"])
                if images:
                    others.append(_user(_parts("\n".join(images), images)))
            elif message["role"] == "tool":  # the call was written in words, and has no id
                others.append(_user(_parts(message["content"], images)))
            else:
                others.append({**message, "content": _parts(message["content"], images)})
        for call_id in [*self._unanswered.values(), *self._not_made]:
            self._answer(call_id, _NOT_MADE)
        self._unanswered, self._not_made = {}, []
        self.messages += others

    def add_reply(self, reply: Mapping[str, Any]) -> None:
        """Append a reply, with the calls that `read_reply` has found in it."""
        self.messages += encodable_json([reply])
        for place, call in enumerate(reply.get("tool_calls") or ()):
            if PLAIN_READER.read(_call_text(call)).made_calls:  # as the adapter reads it
                self._unanswered[place] = call["id"]
            else:
                self._not_made.append(call["id"])

    def _answer(self, call_id: str, content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _user(content: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _parts(text: str, images: Mapping[str, Image]) -> str | list[dict[str, Any]]:
    """Return a message's content, with each image after its note in the text."""
    if not images:
        return text
    parts: list[dict[str, Any]] = []
    # The notes are in the order of the observation's fields, and a template may have another one.
    for note in sorted(images, key=text.index):
        before, _, text = text.partition(note)
        url = f"data:image/png;base64,{base64.b64encode(images[note].png).decode()}"
        parts.append({"type": "text", "text": before + note})
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [*parts, {"type": "text", "text": text}] if text else parts


def read_reply(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an endpoint's message to keep: content or "refusal", and calls."""
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
    """Return a call as text. Invalid JSON in the arguments stays: the adapter tells the model."""
    function = call["function"]
    name = json.dumps(function["name"])
    return f'<tool_call>{{"name": {name}, "arguments": {function["arguments"]}}}</tool_call>'
