"""Write a JSON Schema in a short form that a model reads.

    {
      "direction": "north" | "south",  // where to go
      "steps"?: integer, at least 1, default 1,
      "weights": [number, ...]
    }

Whatever has no short form is left out.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from openenv_pipe.environments.adapters.templates import compact_json

Schema = Mapping[str, Any]

MAX_DEPTH = 5  # levels; a schema may contain itself
INDENT = "  "
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "pattern": "that matches {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}


def schema_text(schema: Schema) -> str:
    """Return the short form of a schema; each `$ref` is replaced by what it names."""
    return _value(schema, schema, 0)


def _value(schema: Any, root: Schema, depth: int) -> str:
    """Describe one value with its limits: `integer, at least 1, at most 5`."""
    schema = resolved(schema, root)
    limits = [words.format(schema[key]) for key, words in LIMITS.items() if key in schema]
    if "default" in schema:
        limits.append(f"default {compact_json(schema['default'])}")
    return ", ".join([_kind(schema, root, depth), *limits])


def _kind(schema: Schema, root: Schema, depth: int) -> str:
    if "const" in schema:
        return compact_json(schema["const"])
    if "enum" in schema:
        return " | ".join(map(compact_json, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            members = (_value(member, root, depth) for member in schema[key])
            return " | ".join(dict.fromkeys(members))
    names = schema.get("type", "any")
    if isinstance(names, list):
        return " | ".join(_kind({**schema, "type": name}, root, depth) for name in names)
    if names == "array":
        return _array(schema, root, depth)
    return _object(schema, root, depth) if "properties" in schema else str(names)


def _array(schema: Schema, root: Schema, depth: int) -> str:
    if depth >= MAX_DEPTH:
        return "array"
    if "prefixItems" in schema:
        members = (_value(member, root, depth + 1) for member in schema["prefixItems"])
        return f"[{', '.join(members)}]"
    return f"[{_value(schema['items'], root, depth + 1)}, ...]" if "items" in schema else "array"


def _object(schema: Schema, root: Schema, depth: int) -> str:
    if depth >= MAX_DEPTH:
        return "object"
    lines = [INDENT + line.replace("\n", "\n" + INDENT) for line in _fields(schema, root, depth)]
    return "\n".join(["{", *lines, "}"])


def _fields(schema: Schema, root: Schema, depth: int) -> Iterator[str]:
    """Yield a line for each field; `?` marks optional ones."""
    required = schema.get("required", [])
    for number, (name, field) in enumerate(schema["properties"].items(), start=1):
        mark = "" if name in required else "?"
        comma = "," if number < len(schema["properties"]) else ""
        told = resolved(field, root).get("description")
        note = f"  // {' '.join(told.split())}" if isinstance(told, str) else ""
        value = _value(field, root, depth + 1)
        yield f"{compact_json(name)}{mark}: {value}{comma}{note}"


def resolved(schema: Any, root: Schema) -> Schema:
    """Return the schema with its `$ref` (looked up in `root`) or its only `allOf` merged in."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}  # `true`: anything
        inner: Any = schema.get("allOf")
        if "$ref" in schema:
            inner = root
            for part in filter(None, str(schema["$ref"]).removeprefix("#").split("/")):
                inner = inner.get(part, {}) if isinstance(inner, Mapping) else {}
        elif isinstance(inner, list) and len(inner) == 1:
            inner = inner[0]
        else:
            return schema
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        schema = {**inner, **own} if isinstance(inner, Mapping) else own
    return schema
