"""JSON Schemas that servers publish: check them once, and walk through them within a budget.

A schema of a few lines can describe more values than any machine has time for, because its parts
may refer to each other and to themselves.
"""

import re
from collections.abc import Mapping
from typing import Any

import jsonschema

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.untrusted_json import MAX_DEPTH, levels

Schema = Mapping[str, Any]

MAX_PARTS = 2000  # lists and objects in a schema, and parts that one walk visits
MAX_REFERENCES = 5  # references that follow each other without a schema between them
OLD_DIALECTS = (jsonschema.Draft3Validator, jsonschema.Draft4Validator)


class LongWalkError(Exception):
    """A walk through a schema has visited `MAX_PARTS` parts and is not at its end."""


def require_schema(schema: Any, whose: str) -> None:
    """Check that a value is a JSON Schema whose parts have the types that the standard demands.

    Raises ConfigError: it is not, or it is too large; the message begins with `whose`.
    """
    try:
        problem = _problem(schema)
    except (RecursionError, ArithmeticError, ValueError, re.error) as error:
        problem = f"it cannot be checked ({error})"
    if problem:
        raise ConfigError(
            f"{whose} is not a JSON Schema that can be used: {problem:.300}; fix the environment"
        )


def validator_class(schema: Schema) -> Any:
    """Return jsonschema's validator of the schema's dialect; the newest one by default."""
    return jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)


def _problem(schema: Any) -> str:
    if not isinstance(schema, dict):
        return f"{schema!r:.80} is not an object"
    if _num_parts(schema) > MAX_PARTS:
        return f"it has more than {MAX_PARTS} parts, or nests more than {MAX_DEPTH} levels deep"
    if not isinstance(schema.get("$schema", ""), str):
        return f"its $schema is {schema['$schema']!r:.80}, expected a string"
    kind = validator_class(schema)
    if kind in OLD_DIALECTS:
        return f"its $schema is {schema['$schema']!r:.80}, expected draft 6 or a later one"
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        place = ".".join(map(str, error.absolute_path))
        return f"{place}: {error.message}" if place else str(error.message)
    return ""


def _num_parts(schema: Any) -> int:
    """Count lists and objects, until there are too many of them or too many levels."""
    count = 0
    for depth, level in enumerate(levels(schema), start=1):
        count += len(level)
        if depth == MAX_DEPTH or count > MAX_PARTS:
            return MAX_PARTS + 1
    return count


class SchemaWalk:
    def __init__(self, root: Schema) -> None:
        self.root = root
        self._num_left = MAX_PARTS

    def resolved(self, schema: Any) -> Schema:
        """Return a part of the schema with its `$ref` or its only `allOf` merged in.

        Raises LongWalkError: too many parts were asked for.
        """
        self._num_left -= 1
        if self._num_left < 0:
            raise LongWalkError
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                return {}  # `true`: anything
            inner: Any = schema.get("allOf")
            if "$ref" in schema:
                inner = self.root
                for part in filter(None, str(schema["$ref"]).removeprefix("#").split("/")):
                    inner = inner.get(part, {}) if isinstance(inner, Mapping) else {}
            elif isinstance(inner, list) and len(inner) == 1:
                inner = inner[0]
            else:
                return schema
            own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
            schema = {**inner, **own} if isinstance(inner, Mapping) else own
        return schema
