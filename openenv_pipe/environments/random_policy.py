"""The scripted policy that plays any environment: actions by chance, made from their JSON Schemas.

For warm starts and baselines where nobody has written a player:
`openenv_pipe.environments.random_policy:random_action`. What a schema only says in a regular
expression or in prose is not met: such actions are refused, and a player of the environment's own
does better.
"""

import random
from collections.abc import Mapping, Sequence
from string import ascii_lowercase, digits
from typing import Any

from openenv_pipe.environments.adapters.schema_text import Schema, resolved
from openenv_pipe.environments.adapters.templates import compact_json
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Observation, Opening, Tool

LETTERS = ascii_lowercase + digits
MOST_LETTERS = 8
MOST_ITEMS = 3
SPAN = 9  # of numbers that have one limit or none
DEEPEST = 5  # levels; a schema may contain itself


def random_action(
    observations: Sequence[Observation], draw: random.Random, *, opening: Opening
) -> str:
    """A call of any tool, or any object of the action's schema, whatever is seen.

    Raises ConfigError where the opening has neither: what a text has to be, no schema says.
    """
    if opening.tools:
        return f"<tool_call>{compact_json(draw_call(opening.tools, draw))}</tool_call>"
    if opening.action_schema:
        return compact_json(draw_value(opening.action_schema, draw))
    raise ConfigError(
        "openenv_pipe.environments.random_policy:random_action plays with env.adapter.type=json "
        "and tool, whose environments say what an action is; for text or python, write a policy: "
        "a function (observations, random) -> reply, given as module:name"
    )


def draw_call(tools: Sequence[Tool], draw: random.Random) -> dict[str, Any]:
    """`name` and `arguments` of a call of one of the tools."""
    function = draw.choice(tools)["function"]
    return {"name": function["name"], "arguments": draw_value(function["parameters"], draw)}


def draw_value(schema: Schema, draw: random.Random) -> Any:
    """A value that the schema allows."""
    return _value(schema, schema, draw, 0)


def _value(schema: Any, root: Schema, draw: random.Random, depth: int) -> Any:
    """`root` is where a `$ref` leads."""
    schema = resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "examples"):
        if schema.get(key):
            return draw.choice(schema[key])
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return _value(draw.choice(schema[key]), root, draw, depth)
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
            return _number(*_limits(schema), draw)
        case "null":
            return None
    return _text(schema, draw)


def _object(schema: Schema, root: Schema, draw: random.Random, depth: int) -> dict[str, Any]:
    """All fields that are required, and each other one in half of the cases."""
    required = schema.get("required", [])
    return {
        name: _value(field, root, draw, depth + 1)
        for name, field in schema.get("properties", {}).items()
        if name in required or (depth < DEEPEST and draw.random() < 0.5)
    }


def _array(schema: Schema, root: Schema, draw: random.Random, depth: int) -> list[Any]:
    if members := schema.get("prefixItems"):
        return [_value(member, root, draw, depth + 1) for member in members]
    fewest = schema.get("minItems", 0)
    most = fewest if depth >= DEEPEST else schema.get("maxItems", fewest + MOST_ITEMS)
    count = draw.randint(fewest, max(fewest, min(most, fewest + MOST_ITEMS)))
    return [_value(schema.get("items", {}), root, draw, depth + 1) for _ in range(count)]


def _number(low: float, high: float, draw: random.Random) -> float:
    """With few digits where the limits leave room: each is one more to be learnt."""
    number = draw.uniform(low, high)
    short = round(number, 2)
    return short if low <= short <= high else number


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
