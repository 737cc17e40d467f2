"""The types of what a request contains, checked before anything translates it.

OpenEnv's proxy expects its dialects as their own clients write them, and fails on other types. The
walk visits a conversation and its tools, and no schemas, arguments and results, which may be any
JSON.
"""

from collections.abc import Iterator
from typing import Any

CONVERSATIONS = ("messages", "input", "contents")
SYSTEM = ("system", "systemInstruction", "system_instruction", "instructions")
# Fields of messages, their parts and tools, by type. Null is as if there were none.
TEXTS = frozenset(("type", "role", "text", "thinking"))
NESTED = frozenset(("content", "parts", "tools", "summary", "output", "functionDeclarations"))
LISTS = frozenset(("parts", "functionDeclarations"))


def check_shape(body: Any) -> str | None:
    """Return what is wrong with the types of a request, in any dialect; None if nothing is."""
    if not isinstance(body, dict):
        return f"the request is {body!r:.40}; expected a JSON object"
    if not isinstance(body.get("stream"), bool | None):
        return f"stream is {body['stream']!r:.40}; expected true or false"
    for name in CONVERSATIONS:
        items = body.get(name, [])
        if not isinstance(items, list) and not (name == "input" and isinstance(items, str)):
            return f"{name} is {items!r:.40}; expected a list"
        for index, item in enumerate(items):
            if not isinstance(item, dict | str) or (name == "messages" and isinstance(item, str)):
                return f"{name}.{index} is {item!r:.40}; expected an object"
    tools = body.get("tools")
    if not isinstance(tools, list | None):
        return f"tools is {tools!r:.40}; expected a list"
    visited = {name: body[name] for name in (*CONVERSATIONS, *SYSTEM, "tools") if name in body}
    return next((problem for name in visited for problem in _problems(visited[name], name)), None)


def _problems(value: Any, path: str) -> Iterator[str]:
    """Yield what has a wrong type in a message, a part of one, a tool, or a list of these."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(item, f"{path}.{index}")
    elif isinstance(value, dict):
        if value.get("type") == "text" and not isinstance(value.get("text"), str):
            yield f"{path}.text is {value.get('text')!r:.40}; expected a text"
        for name, inner in value.items():
            if name in TEXTS and not isinstance(inner, str | None):
                yield f"{path}.{name} is {inner!r:.40}; expected a text"
            elif name in LISTS and not isinstance(inner, list):
                yield f"{path}.{name} is {inner!r:.40}; expected a list"
            elif name in NESTED:
                yield from _problems(inner, f"{path}.{name}")
