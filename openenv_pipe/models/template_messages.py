"""Change messages for chat templates that know no tools or refuse messages of one role in a row."""

import itertools
import json
from collections.abc import Sequence

from openenv_pipe.types import Message, Tool

TOOLS_IN_WORDS = (
    "You can call tools. Write each call as\n"
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call>\nThe tools are:\n'
)


def calls_in_text(message: Message) -> Message:
    """Return a message with its `calls`, each as JSON, in its text, as the model writes calls."""
    rest = {key: value for key, value in message.items() if key != "calls"}
    calls = [f"<tool_call>\n{call}\n</tool_call>" for call in message.get("calls", ())]
    parts = [message["content"], *calls] if message["content"] else calls
    return {**rest, "content": "\n".join(parts)}


def tools_in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put the tools into the first message, because not every template has a system role."""
    first, *others = messages
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return [{**first, "content": f"{TOOLS_IN_WORDS}{lines}\n\n{first['content']}"}, *others]


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Merge messages of one role in a row into one."""
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
