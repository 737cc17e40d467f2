"""Write a JSON Schema in a short form that a model reads.

    {
      "direction": "north" | "south",  // where to go
      "steps"?: integer, at least 1, default 1,
      "weights": [number, ...]
    }

Whatever has no short form is left out.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from openenv_pipe.environments.adapters.templates import compact_json
from openenv_pipe.environments.schemas import LongWalkError, Schema, SchemaWalk
from openenv_pipe.system.untrusted_text import shortened

MAX_DEPTH = 5  # levels; a schema may contain itself
MAX_DESCRIPTION = 2000  # characters
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
    """Return the short form of a schema; each `$ref` is replaced by what it names.

    It has up to `MAX_DEPTH` levels, and fewer if they would have too many parts. The schema's own
    description, such as the docstring of the action's class, is its first line.
    """
    about = description_of(schema)
    first = f"// {about}\n" if about else ""
    for depth in range(MAX_DEPTH, 0, -1):
        with suppress(LongWalkError, RecursionError):
            return first + _Writer(schema, depth).value(schema, 0)
    return f"{first}object"


def description_of(schema: Schema) -> str:
    """Return the description of a schema in one line; empty if it has none."""
    told = schema.get("description")
    return shortened(" ".join(told.split()), MAX_DESCRIPTION) if isinstance(told, str) else ""


class _Writer:
    def __init__(self, schema: Schema, max_depth: int) -> None:
        self._walk = SchemaWalk(schema)
        self._max_depth = max_depth

    def value(self, schema: Any, depth: int) -> str:
        """Describe one value with its limits: `integer, at least 1, at most 5`."""
        schema = self._walk.resolved(schema)
        limits = [words.format(schema[key]) for key, words in LIMITS.items() if key in schema]
        if "default" in schema:
            limits.append(f"default {compact_json(schema['default'])}")
        return ", ".join([self._kind(schema, depth), *limits])

    def _kind(self, schema: Schema, depth: int) -> str:
        if "const" in schema:
            return compact_json(schema["const"])
        if "enum" in schema:
            return " | ".join(map(compact_json, schema["enum"]))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                members = (self.value(member, depth) for member in schema[key])
                return " | ".join(dict.fromkeys(members))
        names = schema.get("type", "any")
        if isinstance(names, list):
            return " | ".join(self._kind({**schema, "type": name}, depth) for name in names)
        if names == "array":
            return self._array(schema, depth)
        return self._object(schema, depth) if "properties" in schema else str(names)

    def _array(self, schema: Schema, depth: int) -> str:
        if depth >= self._max_depth:
            return "array"
        if "prefixItems" in schema:
            members = (self.value(member, depth + 1) for member in schema["prefixItems"])
            return f"[{', '.join(members)}]"
        return f"[{self.value(schema['items'], depth + 1)}, ...]" if "items" in schema else "array"

    def _object(self, schema: Schema, depth: int) -> str:
        if depth >= self._max_depth:
            return "object"
        lines = [INDENT + line.replace("\n", "\n" + INDENT) for line in self._fields(schema, depth)]
        return "\n".join(["{", *lines, "}"])

    def _fields(self, schema: Schema, depth: int) -> Iterator[str]:
        """Yield a line for each field; `?` marks optional ones."""
        required = schema.get("required", [])
        for number, (name, field) in enumerate(schema["properties"].items(), start=1):
            mark = "" if name in required else "?"
            comma = "," if number < len(schema["properties"]) else ""
            about = description_of(self._walk.resolved(field))
            note = f"  // {about}" if about else ""
            value = self.value(field, depth + 1)
            yield f"{compact_json(name)}{mark}: {value}{comma}{note}"
