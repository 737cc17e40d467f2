"""Random actions, made from the JSON Schema that an environment gives of them.

What a schema only says in a regular expression or in prose is not met: such actions are refused,
and a scripted policy does better.
"""

import random
from collections.abc import Mapping, Sequence
from string import ascii_lowercase, digits
from typing import Any

from openenv_pipe.adapters.json import without_metadata
from openenv_pipe.adapters.schema_text import Schema, resolved
from openenv_pipe.plays import Chooser
from openenv_pipe.types import Action, Observation, Tool

LETTERS = ascii_lowercase + digits
MOST_LETTERS = 8
MOST_ITEMS = 3
SPAN = 9  # of numbers that have one limit or none
DEEPEST = 5  # levels; a schema may contain itself


def random_actions(schema: Schema, tools: Sequence[Tool] = ()) -> Chooser:
    """A chooser of one random action a turn: a call of one of the tools, if there are any."""
    own = without_metadata(schema)

    def choose(observations: Sequence[Observation], draw: random.Random) -> Sequence[Action]:
        return [_call(draw.choice(tools), draw) if tools else sample(own, own, draw)]

    return choose


def _call(tool: Tool, draw: random.Random) -> Action:
    function = tool["function"]
    arguments = sample(function["parameters"], function["parameters"], draw)
    return {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}


def sample(schema: Any, root: Schema, draw: random.Random, depth: int = 0) -> Any:
    """A value that the schema allows; `root` is where its `$ref` leads."""
    schema = resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "examples"):
        if schema.get(key):
            return draw.choice(schema[key])
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return sample(draw.choice(schema[key]), root, draw, depth)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match draw.choice(kind) if isinstance(kind, list) else kind:
        case "object":
            return _object(schema, root, draw, depth)
        case "array":
            return _array(schema, root, draw, depth)
        case "boolean":
            return draw.random() < 0.5
        case "integer":
            low, high = _limits(schema)
            return draw.randint(int(low), max(int(low), int(high)))
        case "number":
            return draw.uniform(*_limits(schema))
        case "null":
            return None
    return _text(schema, draw)


def _object(schema: Schema, root: Schema, draw: random.Random, depth: int) -> dict[str, Any]:
    """All fields that are required, and each other one in half of the cases."""
    required = schema.get("required", [])
    return {
        name: sample(field, root, draw, depth + 1)
        for name, field in schema.get("properties", {}).items()
        if name in required or (depth < DEEPEST and draw.random() < 0.5)
    }


def _array(schema: Schema, root: Schema, draw: random.Random, depth: int) -> list[Any]:
    if members := schema.get("prefixItems"):
        return [sample(member, root, draw, depth + 1) for member in members]
    fewest = schema.get("minItems", 0)
    most = fewest if depth >= DEEPEST else schema.get("maxItems", fewest + MOST_ITEMS)
    count = draw.randint(fewest, max(fewest, min(most, fewest + MOST_ITEMS)))
    return [sample(schema.get("items", {}), root, draw, depth + 1) for _ in range(count)]


def _limits(schema: Mapping[str, Any]) -> tuple[float, float]:
    """The lowest and the highest number to draw."""
    edge = 1 if schema.get("type") == "integer" else 1e-6
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + edge
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - edge
    if low is None:
        low = 0 if high is None else high - SPAN
    return low, low + SPAN if high is None else high


def _text(schema: Schema, draw: random.Random) -> str:
    fewest = max(1, schema.get("minLength", 1))
    most = min(schema.get("maxLength", MOST_LETTERS), max(fewest, MOST_LETTERS))
    return "".join(draw.choices(LETTERS, k=draw.randint(fewest, max(fewest, most))))
