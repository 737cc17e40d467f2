"""Draw values that a JSON Schema allows, at random or as an example.

What a schema says only in a regular expression or in prose is ignored.
"""

import random
from collections.abc import Mapping
from contextlib import suppress
from string import ascii_lowercase, digits
from typing import Any

from openenv_pipe.environments.schemas import LongWalkError, Schema, SchemaWalk
from openenv_pipe.errors import ConfigError

LETTERS = ascii_lowercase + digits
MAX_LETTERS = 8
MAX_REQUIRED_LETTERS = 10_000
MAX_EXTRA_ITEMS = 3
DEFAULT_SPAN = 9  # width of the range of numbers that have one limit or none
MAX_DEPTH = 5  # levels; a schema may contain itself


def draw_value(schema: Schema, draw: random.Random, max_depth: int = MAX_DEPTH) -> Any:
    """Draw a value that the schema allows, with up to `max_depth` levels of optional parts.

    Raises ConfigError: the required parts alone are too many, or have no end.
    """
    for depth in range(max_depth, -1, -1):
        with suppress(LongWalkError, RecursionError, ArithmeticError, ValueError):
            return _Drawer(schema, draw, depth).value(schema, 0)
    raise ConfigError(
        "the environment's schema asks for values that are too large to draw at random, or nest "
        "without end; write a policy: a function (observations, random) -> reply, as module:name"
    )


class _Drawer:
    def __init__(self, schema: Schema, draw: random.Random, max_depth: int) -> None:
        self._walk = SchemaWalk(schema)
        self._draw = draw
        self._max_depth = max_depth

    def value(self, schema: Any, depth: int) -> Any:
        schema, draw = self._walk.resolved(schema), self._draw
        if "const" in schema:
            return schema["const"]
        for key in ("enum", "examples"):
            if schema.get(key):
                return draw.choice(schema[key])
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return self.value(draw.choice(schema[key]), depth)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        match draw.choice(kind) if isinstance(kind, list) else kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "boolean":
                return draw.random() < 0.5
            case "integer":
                low, high = _limits(schema)
                return draw.randint(int(low), max(int(low), int(high)))
            case "number":
                low, high = _limits(schema)
                number = draw.uniform(low, high)
                short = round(number, 2)  # two decimals if within the limits: fewer to learn
                return short if low <= short <= high else number
            case "null":
                return None
        return _text(schema, draw)

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        """Draw an object with all required fields, and each other one with probability 1/2."""
        required = schema.get("required", [])
        return {
            name: self.value(field, depth + 1)
            for name, field in schema.get("properties", {}).items()
            if name in required or (depth < self._max_depth and self._draw.random() < 0.5)
        }

    def _array(self, schema: Schema, depth: int) -> list[Any]:
        if members := schema.get("prefixItems"):
            return [self.value(member, depth + 1) for member in members]
        fewest = int(schema.get("minItems", 0))
        spread = 0 if depth >= self._max_depth else MAX_EXTRA_ITEMS
        most = min(int(schema.get("maxItems", fewest + spread)), fewest + spread)
        count = self._draw.randint(fewest, max(fewest, most))
        return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]


def _limits(schema: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lowest and the highest number to draw."""
    edge = 1 if schema.get("type") == "integer" else 1e-6
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + edge
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - edge
    if low is None:
        low = 0 if high is None else high - DEFAULT_SPAN
    return low, low + DEFAULT_SPAN if high is None else high


def _text(schema: Schema, draw: random.Random) -> str:
    fewest = min(MAX_REQUIRED_LETTERS, max(1, int(schema.get("minLength", 1))))
    most = min(int(schema.get("maxLength", MAX_LETTERS)), max(fewest, MAX_LETTERS))
    return "".join(draw.choices(LETTERS, k=draw.randint(fewest, max(fewest, most))))
