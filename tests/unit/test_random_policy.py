"""The random policy plays any environment: its replies are valid by the schemas and tools."""

import json
import random

import jsonschema
import pytest
from fakes import TEMPLATES

from openenv_pipe.config.schema import JsonAdapterConfig, ToolAdapterConfig
from openenv_pipe.engines.scripted import replies_of
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.random_policy import random_action
from openenv_pipe.environments.random_values import draw_value
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Opening

SCHEMA = {
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 3}, "y": {"enum": ["top", None]}},
            "required": ["x"],
        }
    },
    "type": "object",
    "properties": {
        "move": {"enum": ["left", "right"]},
        "count": {"type": "integer", "minimum": 1, "exclusiveMaximum": 4},
        "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "sure": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 3}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
        "weights": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
        "pair": {"type": "array", "prefixItems": [{"const": "a"}, {"type": "integer"}]},
        "kind": {"type": ["string", "integer"]},
        "metadata": {"type": "object"},
    },
    "required": ["move", "count", "weights"],
}
JSON = build_adapter(JsonAdapterConfig(type="json", hidden_fields=[], **TEMPLATES), SCHEMA)
TOOL = build_adapter(ToolAdapterConfig(type="tool", plain_reply="unusable", **TEMPLATES))


async def no_questions(action):
    raise AssertionError(action)


async def played(opening, adapter, number=300):
    """Return what the adapter reads from this many replies to the first messages."""
    reply, draw = replies_of(random_action), random.Random(0)
    replies = [await reply([{"text": "go"}], draw, opening) for _ in range(number)]
    assert all(text == text.strip() for text in replies)
    return [action for text in replies for action in adapter.read(text)]


async def test_objects_are_what_the_environments_schema_says():
    actions = await played(await JSON.open({"text": "go"}, no_questions), JSON)
    for action in actions:  # the adapter accepted every reply
        jsonschema.validate(action, SCHEMA)
    assert {action["move"] for action in actions} == {"left", "right"}
    assert set().union(*actions) == set(SCHEMA["properties"]) - {"metadata"}
    assert any("y" in action["place"] for action in actions if "place" in action)


async def test_calls_are_of_all_tools_with_arguments_of_their_own():
    async def listed(action):
        tools = {"place": SCHEMA, "stop": {"type": "object", "properties": {}}}
        return {"tools": [{"name": name, "inputSchema": each} for name, each in tools.items()]}

    actions = await played(await TOOL.open({"text": "go"}, listed), TOOL)
    assert len(actions) == 300
    assert {action["tool_name"] for action in actions} == {"place", "stop"}
    for action in actions:
        assert action["type"] == "call_tool"
        if action["tool_name"] == "place":
            jsonschema.validate(action["arguments"], SCHEMA)
        else:
            assert action["arguments"] == {}


def test_the_same_draw_is_the_same_action():
    replies = [
        random_action([], random.Random(seed), opening=Opening(messages=(), action_schema=SCHEMA))
        for seed in (1, 1, 2)
    ]
    assert replies[0] == replies[1] != replies[2]
    assert json.loads(replies[0])


def test_numbers_are_short_and_within_their_limits():
    draw = random.Random(0)
    wide = [draw_value({"type": "number"}, draw) for _ in range(50)]
    assert max(len(str(number)) for number in wide) <= 4
    narrow = {"type": "number", "exclusiveMinimum": 0.001, "maximum": 0.002}
    for _ in range(50):
        jsonschema.validate(draw_value(narrow, draw), narrow)


def test_a_schema_that_contains_itself_ends():
    tree = {"properties": {"next": {"$ref": "#"}, "all": {"items": {"$ref": "#"}}}}
    for seed in range(50):
        draw_value(tree, random.Random(seed))


async def test_where_a_reply_is_text_a_policy_has_to_be_written():
    reply = replies_of(random_action)
    with pytest.raises(ConfigError, match=r"adapter\.type=json or tool.*write a policy"):
        await reply([{"text": "go"}], random.Random(0), Opening(messages=()))


def test_legal_actions_that_the_observation_lists_are_drawn():
    schema = {"properties": {"move": {"type": "string"}, "note": {}}, "required": ["move"]}
    opening = Opening(messages=[], action_schema=schema)
    seen = [{"legal_moves": ["e7e5"]}, {"legal_moves": ["e2e4"], "legal_actions_text": "all"}]
    drawn = [json.loads(random_action(seen, random.Random(i), opening=opening)) for i in range(5)]
    assert {action["move"] for action in drawn} == {"e2e4"}
    numbers = [{"legal_moves": [1, 2]}]
    drawn = json.loads(random_action(numbers, random.Random(0), opening=opening))
    assert isinstance(drawn["move"], str), "a list of another type does not fit the field"
