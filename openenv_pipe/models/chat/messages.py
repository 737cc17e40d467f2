"""Adapt messages to chat templates: put calls and tools into fields or text, merge messages."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from openenv_pipe.types import Message, Tool

TOOLS_IN_WORDS = (
    "You can call tools. Write each call as\n"
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call>\nThe tools are:\n'
)


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the first messages as they are recorded: with the tools before them, if any."""
    described = [{"role": "tools", "content": json.dumps(list(tools))}] if tools else []
    return [*described, *messages]


def split_tools(recorded: Sequence[Message]) -> tuple[list[Tool], list[Message]]:
    """Return the tools of recorded messages, and the messages that the model was shown.

    A client's message with the role `tools` but no list of tools is like any other message.
    """
    if recorded and recorded[0]["role"] == "tools":
        with suppress(TypeError, ValueError):
            tools = json.loads(recorded[0]["content"])
            if isinstance(tools, list):
                return tools, [*recorded[1:]]
    return [], [*recorded]


def calls_in_text(message: Message) -> Message:
    """Return a message with its `calls`, each as JSON, in its text, as the model writes calls."""
    rest = {key: value for key, value in message.items() if key != "calls"}
    calls = [f"<tool_call>\n{call}\n</tool_call>" for call in message.get("calls", ())]
    parts = [message["content"], *calls] if message["content"] else calls
    return {**rest, "content": "\n".join(parts)}


def calls_in_fields(message: Message) -> Message:
    """Return a message with its `calls`, each as JSON, in the field that chat templates read."""
    rest = {key: value for key, value in message.items() if key != "calls"}
    return {**rest, **tool_calls(map(json.loads, message.get("calls", ())))}


def tool_calls(functions: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the field `tool_calls` of a message; nothing if there are none."""
    calls = [{"type": "function", "function": function} for function in functions]
    return {"tool_calls": calls} if calls else {}


def in_order_of_calls(results: Sequence[tuple[int | None, Message]]) -> list[Message]:
    """Return consecutive results in the order of the calls that they answer.

    Many templates show no ids, so that the model can tell results apart by their order alone. A
    result keeps the place of its call as `call` if a call before that has no result.

    results: each with the place of its call among the calls of the message before; None: it is
        unknown, and all results stay as they are
    """
    known = [(place, result) for place, result in results if place is not None]
    if len(known) < len(results):
        return [result for _, result in results]
    known.sort(key=lambda each: each[0])
    return [
        result if place == number else {**result, "call": place}
        for number, (place, result) in enumerate(known)
    ]


def next_call(open_ids: dict[int, str], result: Message) -> str:
    """Take the id of the call that a result answers: that at its `call`, or the first one.

    open_ids: of the calls that no result has answered, by their place; at least one.
    """
    wanted = result.get("call")
    return open_ids.pop(wanted if wanted in open_ids else min(open_ids))


def paired(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose results name the call that they answer: `call`, or the next one.

    Results without a call become messages of the user, because templates reject them.
    """
    changed: list[Message] = []
    open_ids: dict[int, str] = {}  # of the calls that no result has answered, by their place
    num_calls = 0
    for message in messages:
        if message["role"] == "tool" and open_ids:
            result = {key: value for key, value in message.items() if key != "call"}
            changed.append({**result, "tool_call_id": next_call(open_ids, message)})
            continue
        if message["role"] == "tool":
            changed += results_as_user([message])
            continue
        calls = message.get("tool_calls", ())
        open_ids = {place: f"call{num_calls + place:05}" for place in range(len(calls))}
        num_calls += len(calls)
        named = [{**call, "id": open_ids[place]} for place, call in enumerate(calls)]
        changed.append({**message, "tool_calls": named} if named else message)
    return changed


def described(tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools, each with a description, because some templates need one."""
    functions = [tool["function"] for tool in tools]
    return [
        {**tool, "function": {**function, "description": function.get("description") or ""}}
        for tool, function in zip(tools, functions, strict=True)
    ]


def tools_in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put the tools into the first message, because not every template has a system role."""
    first, *others = messages
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return [{**first, "content": f"{TOOLS_IN_WORDS}{lines}\n\n{first['content']}"}, *others]


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive messages of one role into one."""
    return [
        {**last, "content": "\n\n".join(each["content"] for each in [*others, last])}
        for _, group in itertools.groupby(messages, lambda each: each["role"])
        for *others, last in [list(group)]
    ]


def results_as_user(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive results into one user message: many templates require alternating turns."""
    changed: list[Message] = []
    for is_result, group in itertools.groupby(messages, lambda each: each["role"] == "tool"):
        if is_result:
            texts = (f"<tool_response>\n{each['content']}\n</tool_response>" for each in group)
            changed.append({"role": "user", "content": "\n".join(texts)})
        else:
            changed.extend(group)
    return changed
