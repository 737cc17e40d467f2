"""One conversation as the endpoint has to be told it, with every time the whole of it."""

from collections.abc import Mapping, Sequence
from typing import Any

_NOT_MADE = "This call was not made."


class Conversation:
    """Messages and tools so far.

    An endpoint wants each call of a tool answered under the call's id, in a message of the role
    `tool`, and nothing else in that role. Environments answer calls in their order.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[Any] = []
        self._unanswered: list[str] = []  # ids of the last reply's calls

    def hear(self, said: Mapping[str, Any]) -> None:
        """Takes in what was packed by `TextChat`: messages, at first with the tools."""
        self.tools = said.get("tools", self.tools)
        others = [message for message in said["messages"] if not self._answer(message)]
        for call_id in self._unanswered:
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": _NOT_MADE})
        self._unanswered = []
        self.messages += others

    def say(self, reply: Mapping[str, Any]) -> None:
        """Takes in the endpoint's own reply, as it gave it."""
        self.messages.append({"role": "assistant", **reply})
        self._unanswered = [call["id"] for call in reply.get("tool_calls", ())]

    def _answer(self, message: dict[str, Any]) -> bool:
        """Whether the message was the result of a call; one that was made in words has no id."""
        if message["role"] != "tool":
            return False
        if self._unanswered:
            call_id = self._unanswered.pop(0)
            content = message["content"]
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            return True
        message["role"] = "user"
        message.pop("name", None)
        return False


def read_reply(message: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of an endpoint's message: content or refusal, and calls; no reasoning."""
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
