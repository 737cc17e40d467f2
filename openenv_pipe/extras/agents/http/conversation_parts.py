"""Which parts of a conversation the model is shown, by dialect.

The proxy's translation leaves out the parts of types that it does not know, so that the model would
answer a conversation that it has seen only in part. Requests with such parts are rejected, as parts
without text are in OpenAI's own form. Parts that say nothing to the model are noted.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from openenv_pipe.extras.agents.http.capture import APIType

# The place of a part, its type, and the types that are read there.
_Part = tuple[str, str, tuple[str, ...]]

# Types of parts that are left out, without content of their own.
NOTED = frozenset(("redacted_thinking", "tool_reference", "mcp_list_tools"))
TEXT = ("text",)
RESPONSES_TEXT = ("input_text", "output_text", "text")
RESPONSES_OUTPUTS = ("function_call_output", "local_shell_call_output", "shell_call_output")
RESPONSES_ITEMS = (
    *("message", "input_text", "reasoning", "function_call", "local_shell_call", "shell_call"),
    *RESPONSES_OUTPUTS,
)
ANTHROPIC_BLOCKS: Mapping[Any, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}
GOOGLE_PARTS: Mapping[Any, tuple[str, ...]] = {
    "model": ("text", "functionCall"),
    **dict.fromkeys(("system", "developer"), TEXT),
}
GOOGLE_PARTS_OF_USERS = ("text", "functionResponse")
# Keys of Google's parts that are no content, in lower case without underscores.
GOOGLE_NOTES = frozenset(
    ("thought", "thoughtsignature", "videometadata", "mediaresolution", "partmetadata")
)
# Fields of messages in OpenAI's own form that are not read, with what to send in their place.
CHAT_FIELDS = {
    "function_call": "send it as tool_calls",
    "refusal": "send it as content",
    "audio": "send its text as content",
}


def find_unshown(dialect: APIType, body: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of parts that are left out and say nothing, under a name for notes.

    Raises ValueError: the model would not be shown a part.
    """
    parts = {
        APIType.OPENAI_CHAT: _in_chat,
        APIType.OPENAI_RESPONSES: _in_responses,
        APIType.ANTHROPIC: _in_anthropic,
        APIType.GOOGLE: _in_google,
    }[dialect]
    noted = []
    for place, kind, read in parts(body):
        if kind in NOTED:
            noted.append(kind)
        elif kind not in read:
            raise ValueError(
                f"{place} is of type {kind!r:.40}, which the model cannot be shown; send text in "
                "its place"
            )
    return {"parts of type": ", ".join(dict.fromkeys(noted))} if noted else {}


def _in_chat(body: Mapping[str, Any]) -> Iterator[_Part]:
    for place, message in _listed(body, "messages", ""):
        for name, advice in CHAT_FIELDS.items():
            if _field(message, name):
                raise ValueError(f"{place}.{name} is not supported: {advice}")
        for part_place, part in _listed(message, "content", place):
            # Servers read text whatever its part is called.
            kind = "text" if isinstance(_field(part, "text"), str) else _type_of(part)
            yield part_place, kind, TEXT


def _in_responses(body: Mapping[str, Any]) -> Iterator[_Part]:
    yield from _texts(body, "instructions", "", RESPONSES_TEXT)
    for place, item in _listed(body, "input", ""):
        if not isinstance(item, dict):
            raise ValueError(f"{place} is {item!r:.40}; expected an object")
        is_message = not _field(item, "type") and _field(item, "role") is not None
        kind = "message" if is_message else _type_of(item)
        yield place, kind, RESPONSES_ITEMS
        if kind == "message":
            yield from _texts(item, "content", place, RESPONSES_TEXT)
        elif kind in RESPONSES_OUTPUTS:
            # The proxy looks for the output in these fields of an output that is an object.
            name = "output"
            while isinstance(item.get(name), dict):
                place, item = f"{place}.{name}", item[name]
                name = next((each for each in ("output", "body", "content") if each in item), "")
            yield from _texts(item, name, place, RESPONSES_TEXT)


def _in_anthropic(body: Mapping[str, Any]) -> Iterator[_Part]:
    yield from _texts(body, "system", "", TEXT)
    for place, message in _listed(body, "messages", ""):
        blocks = list(_listed(message, "content", place))
        read = ANTHROPIC_BLOCKS.get(_field(message, "role") or "user", TEXT)
        # Beside calls and results, the proxy keeps text alone.
        has_calls = any(_field(block, "type") in ("tool_use", "tool_result") for _, block in blocks)
        for block_place, block in blocks:
            yield block_place, _block_type(block, reads_documents=not has_calls), read
            if _field(block, "type") == "tool_result":
                for part_place, part in _listed(block, "content", block_place):
                    yield part_place, _block_type(part, reads_documents=True), TEXT


def _block_type(block: Any, *, reads_documents: bool) -> str:
    """Return the type of a block, which is `text` for a document that is read as one."""
    source = _field(block, "source")
    if _type_of(block) == "document" and reads_documents and isinstance(source, dict):
        if source.get("type") == "text":
            return "text"
        parts = source.get("content") if source.get("type") == "content" else None
        if isinstance(parts, list) and all(_type_of(part) == "text" for part in parts):
            return "text"
    return _type_of(block)


def _in_google(body: Mapping[str, Any]) -> Iterator[_Part]:
    config = body.get("config")
    for fields in (body, config if isinstance(config, dict) else {}):
        for name in ("systemInstruction", "system_instruction"):
            given = fields.get(name)
            yield from _google_parts(given if isinstance(given, dict) else {"parts": given}, name)
    for place, content in _listed(body, "contents", ""):
        if not isinstance(content, dict):
            raise ValueError(f"{place} is {content!r:.40}; expected an object with parts")
        yield from _google_parts(content, place)


def _google_parts(content: Any, place: str) -> Iterator[_Part]:
    role = _field(content, "role")
    is_system = place.startswith("system")
    read = TEXT if is_system else GOOGLE_PARTS.get(role, GOOGLE_PARTS_OF_USERS)
    for part_place, part in _listed(content, "parts", place):
        if not isinstance(part, dict):
            yield part_place, _type_of(part), read
            continue
        for name, value in part.items():
            if value is not None and name.replace("_", "").lower() not in GOOGLE_NOTES:
                yield part_place, name, read
        # A result may have images and files beside its response.
        if (response := _field(part, "functionResponse")) and _field(response, "parts"):
            yield f"{part_place}.functionResponse", "parts", ("response",)


def _texts(fields: Any, name: str, place: str, read: tuple[str, ...]) -> Iterator[_Part]:
    for part_place, part in _listed(fields, name, place):
        yield part_place, _type_of(part), read


def _listed(fields: Any, name: str, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of a field that is a list, each with its place."""
    items = _field(fields, name)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        yield f"{place}.{name}.{index}".removeprefix("."), item


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _type_of(part: Any) -> str:
    if isinstance(part, str):
        return "text"
    return str(part.get("type")) if isinstance(part, dict) else type(part).__name__
