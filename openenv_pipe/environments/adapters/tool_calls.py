"""Find tool calls in a model's reply, in the two styles that open models use.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>    Hermes, Qwen
    {"name": "add", "parameters": {"a": 1}}                          Llama and others: bare JSON

Whether the tool exists is left to the environment, whose answer goes to the model.
"""

import re
from typing import Any

from openenv_pipe.environments.adapters.base import UnusableReply
from openenv_pipe.environments.adapters.reply_json import find_objects, without_thoughts
from openenv_pipe.types import Action

MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
FORM = '{"name": ..., "arguments": {...}}'


def tool_calls(reply: str) -> list[Action]:
    """Return the calls in a reply as OpenEnv actions, in order; empty if there are none.

    If there are marked calls, bare ones are ignored.

    Raises:
        UnusableReply: A call is broken.
    """
    answer = without_thoughts(reply)
    marked = MARKED.findall(answer)
    if marked:
        return [_marked_call(text, number) for number, text in enumerate(marked, start=1)]
    return [call_action(call) for call in find_objects(answer) if _is_call(call)]


def _marked_call(text: str, number: int) -> Action:
    try:
        calls = find_objects(text)
    except UnusableReply as unusable:
        raise UnusableReply(f"tool call {number}: {unusable}") from None
    if len(calls) != 1 or not _is_call(calls[0]):
        raise UnusableReply(f"tool call {number} is not one object of the form {FORM}")
    return call_action(calls[0])


def _is_call(value: dict[str, Any]) -> bool:
    return isinstance(value.get("name"), str) and isinstance(_arguments(value), dict)


def _arguments(call: dict[str, Any]) -> Any:
    return call.get("arguments", call.get("parameters"))


def call_action(call: dict[str, Any]) -> Action:
    """Return the OpenEnv action of a call with a name and arguments."""
    return {"type": "call_tool", "tool_name": call["name"], "arguments": _arguments(call)}
