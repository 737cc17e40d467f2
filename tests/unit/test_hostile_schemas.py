"""Schemas, patterns and replies that are made to hang or to break whoever works on them.

No test measures time: without the limits, each of these cases takes hours, or all memory.
"""

import json
import random

import pytest
from fakes import TEMPLATES

from openenv_pipe.config.schema import JsonAdapterConfig
from openenv_pipe.environments.adapters import UnusableReply, build_adapter
from openenv_pipe.environments.adapters.schema_text import schema_text
from openenv_pipe.environments.adapters.tool import tools_of
from openenv_pipe.environments.random_values import draw_value
from openenv_pipe.environments.schemas import require_schema
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.patterns import LimitedPattern, SlowPatternError

pytestmark = pytest.mark.slow

SLOW = r"^(a|aa|b)+$"
SLOW_TEXT = "a" * 60 + "!"
DOUBLING = {
    f"a{number}": {"anyOf": [{"$ref": f"#/$defs/a{number + 1}"}] * 2} for number in range(60)
} | {"a60": {"type": "object", "required": ["x"]}}


def nested(levels):
    schema = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


BROKEN = {
    "required is no list": {"required": 1},
    "enum is no list": {"enum": 3},
    "properties are no object": {"properties": []},
    "a field is a number": {"properties": {"a": 1}},
    "nested wrong type": {"properties": {"a": {"items": {"enum": {}}}}},
    "unknown type": {"type": "objekt"},
    "no object": [1],
    "text": "schema",
    "dialect is no text": {"$schema": 3},
    "dialect of draft 3": {"$schema": "http://json-schema.org/draft-03/schema#"},
    "reference is no text": {"$ref": 5},
    "limit is no number": {"properties": {"a": {"minimum": "x"}}},
    "pattern is no regex": {"pattern": "("},
    "pattern repeats without end": {"pattern": "a{99999999999}"},
    "pattern nests without end": {"pattern": "(" * 5000},
    "too deep": nested(200),
    "too many parts": {"properties": {f"f{number}": {} for number in range(5000)}},
}
HUGE = {
    "contains itself, many fields": {"properties": {f"f{n}": {"$ref": "#"} for n in range(60)}},
    "alternatives of itself": {"properties": {"a": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}},
    "doubles 60 times": {"$defs": DOUBLING, "properties": {"a": {"$ref": "#/$defs/a0"}}},
    "slow pattern": {"properties": {"a": {"pattern": SLOW}}},
    "slow pattern of names": {"patternProperties": {SLOW: False}, "additionalProperties": False},
    "slow pattern in another dialect": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {
            "a": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": SLOW}
        },
    },
    "unique items": {"properties": {"a": {"uniqueItems": True}}},
    "large enum": {"properties": {"a": {"items": {"enum": list(range(300_000))}}}},
    "multiples": {"properties": {"a": {"multipleOf": 0.1}}},
}
REPLIES = {
    "empty": "{}",
    "slow text": json.dumps({"a": SLOW_TEXT}),
    "slow name": json.dumps({SLOW_TEXT: 1}),
    "long list": json.dumps({"a": [{}] * 30_000}),
    "list of numbers": json.dumps({"a": list(range(20_000))}),
    "nested like the schema": '{"f1": ' * 60 + "{}" + "}" * 60,
    "deep": '{"a": ' * 3000 + "1" + "}" * 3000,
    "huge integer": json.dumps({"a": 10**4000}),
}


def json_adapter(schema):
    return build_adapter(JsonAdapterConfig(type="json", hidden_fields=[], **TEMPLATES), schema)


@pytest.mark.parametrize("schema", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_schema_is_rejected_in_one_short_line(schema):
    for build in (json_adapter, lambda each: require_schema(each, "the schema")):
        with pytest.raises(ConfigError) as caught:
            build(schema)
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)


def test_a_tool_with_a_broken_schema_is_named():
    with pytest.raises(ConfigError, match="schema of the tool 'add'"):
        tools_of({"tools": [{"name": "add", "inputSchema": BROKEN["unknown type"]}]})


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
@pytest.mark.parametrize("schema", HUGE.values(), ids=HUGE.keys())
def test_any_reply_is_an_action_or_unusable(schema, reply):
    try:
        json_adapter(schema).read(reply)
    except UnusableReply as unusable:
        assert len(str(unusable)) < 1000


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}, {"$defs": DOUBLING, **DOUBLING["a0"]}]
)
def test_a_schema_that_no_action_can_be_checked_with_is_rejected_at_the_start(schema):
    with pytest.raises(ConfigError, match="cannot be applied"):
        json_adapter(schema)


@pytest.mark.parametrize("schema", HUGE.values(), ids=HUGE.keys())
def test_the_short_form_of_any_schema_ends(schema):
    assert len(schema_text(schema)) < 3_000_000


def test_the_short_form_loses_levels_where_they_would_be_too_many():
    text = schema_text(HUGE["contains itself, many fields"])
    assert '"f59"?: object' in text
    few = schema_text({"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}})
    assert few.count('"a"?') == 31  # five levels, as there are few parts


@pytest.mark.parametrize("schema", HUGE.values(), ids=HUGE.keys())
def test_a_random_value_of_any_schema_is_drawn(schema):
    for seed in range(3):
        draw_value(schema, random.Random(seed))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "minItems": 10**12},
        {"type": "number", "exclusiveMinimum": 10**400},
        {"type": "integer", "minimum": float("inf")},
    ],
)
def test_values_without_end_cannot_be_drawn(schema):
    with pytest.raises(ConfigError, match="write a policy"):
        draw_value(schema, random.Random(0))


def test_a_text_of_any_length_is_drawn_in_part():
    assert len(draw_value({"type": "string", "minLength": 10**12}, random.Random(0))) == 10_000


def test_a_slow_pattern_of_the_configuration_makes_the_reply_unusable():
    from tests.unit.test_adapters import text_adapter

    with pytest.raises(UnusableReply, match="cannot be matched"):
        text_adapter(pattern=r"^(?P<word>(a|aa)+)$").read(SLOW_TEXT)


@pytest.mark.parametrize(
    "source",
    ["a{100000000}", "((a{99}){99}){99}", "x|(?=[ab]{9999999}c)", "(?P<a>x)(?(a)y{9999999}|z)"],
)
def test_patterns_that_take_all_memory_are_rejected(source):
    with pytest.raises(ValueError, match="more than 100000 parts"):
        LimitedPattern(source)


def test_patterns_are_those_of_re():
    assert LimitedPattern(r"(?s)(?P<a>x.*)$").search("ax\n").groupdict() == {"a": "x\n"}
    assert dict(LimitedPattern(r"(?P<a>x)(y)(?P<b>z)?").groups) == {"a": 1, "b": 3}
    assert LimitedPattern(r"(?:[ab]{0,9999999}|(?>c){999})d").search("abad")
    with pytest.raises(SlowPatternError, match="61 characters"):
        LimitedPattern(SLOW).search(SLOW_TEXT)
    for source in ("(", "(?P<a>x)(?P<a>y)", "a{99999999999}", "(" * 5000):
        with pytest.raises(ValueError, match=r"."):
            LimitedPattern(source)
