"""Read the arguments of calls that are written as text, and cast them by the tool's schema."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openenv_pipe.models.replies.json_values import read_object
from openenv_pipe.types import Tool

_NUMBER = re.compile(r"(?a:-?(?:0|[1-9]\d{0,400})(?:\.\d+)?(?:[eE][+-]?\d{1,4})?)")
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_NULLS = ("null", "None")


def properties_of(tool: Tool) -> Mapping[str, tuple[str, ...]]:
    """Return the JSON types of a tool's parameters, by name, in the order of the schema."""
    schema = tool["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {
        key: tuple(dict.fromkeys(_types(each, schema, set()))) for key, each in properties.items()
    }


def _types(schema: Any, root: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """Yield the types that a schema names, whatever else it is.

    seen: the schemas before it, by identity: references can lead back to them
    """
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else _listed(declared)
    yield from (each for each in names if isinstance(each, str))
    if schema.get("nullable"):
        yield "null"
    for choice in ("anyOf", "oneOf", "allOf"):
        for each in _listed(schema.get(choice)):
            yield from _types(each, root, seen)
    yield from map(_type_of, _listed(schema.get("enum")))
    if "const" in schema:
        yield _type_of(schema["const"])
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for key in reference[2:].split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        yield from _types(found, root, seen)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return names.get(type(value), "array" if isinstance(value, list) else "object")


def cast(text: str, types: tuple[str, ...]) -> Any:
    """Return the value of the first type that a text can have; the text itself if there is none.

    A text that looks like a number stays text if the schema says so, or says nothing.
    """
    word = text.strip()
    if "null" in types and word in _NULLS:
        return None
    for each in types:
        if each == "string":
            return text
        if each == "boolean" and word in _WORDS:
            return _WORDS[word]
        if each in ("integer", "number") and _NUMBER.fullmatch(word):
            value = json.loads(word)
            if each == "integer" and isinstance(value, float) and value.is_integer():
                return int(value)
            if isinstance(value, int) or (each == "number" and abs(value) < float("inf")):
                return value
        if each in ("object", "array") and word[:1] == ("{" if each == "object" else "["):
            read = read_object(f'{{"value":{word}}}', 0, len(word) + 10)
            if read.value and len(read.value) == 1 and read.end == len(word) + 10:
                return read.value["value"]
    return text
