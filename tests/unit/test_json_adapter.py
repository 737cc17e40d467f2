"""Adapter `json`: the schema as text, replies as actions. Trap numbers: tests/README.md."""

import json

import pytest
from fakes import TEMPLATES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openenv_pipe.config.schema import JsonAdapterConfig
from openenv_pipe.environments.adapters import UnusableReply, build_adapter
from openenv_pipe.environments.adapters.schema_text import schema_text
from openenv_pipe.errors import ConfigError

ORDER = {
    "type": "object",
    "title": "Order",
    "additionalProperties": False,
    "required": ["side", "amount"],
    "$defs": {
        "Side": {"type": "string", "enum": ["buy", "sell"]},
        "Limit": {"type": "object", "properties": {"price": {"type": "number"}}},
    },
    "properties": {
        "metadata": {"type": "object", "description": "Additional metadata for the action"},
        "side": {"$ref": "#/$defs/Side"},
        "amount": {"type": "integer", "minimum": 1, "maximum": 10, "description": "How\nmany"},
        "limits": {"type": "array", "items": {"$ref": "#/$defs/Limit"}},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None},
    },
}
SHORT = """{
  "side": "buy" | "sell",
  "amount": integer, at least 1, at most 10,  // How many
  "limits"?: [{
    "price"?: number
  }, ...],
  "note"?: string, at most 3 characters | null, default null
}"""


def json_adapter(schema=None, **changes):
    values = {"type": "json", "hidden_fields": [], **TEMPLATES, "system": "{{ action_schema }}"}
    config = JsonAdapterConfig.model_validate(values | changes)
    return build_adapter(config, ORDER if schema is None else schema)


async def opening(adapter, observation):
    return [
        (message["role"], message["content"])
        for message in (await adapter.open(observation, None)).messages
    ]


async def test_the_schema_tells_the_model_what_to_write():
    assert await opening(json_adapter(), {"price": 1.5}) == [
        ("system", SHORT),
        ("user", '{"price":1.5}'),
    ]


async def test_observations_are_json_without_what_is_empty():
    adapter = json_adapter(system=None)
    seen = {"price": 0.0, "note": None, "text": "", "list": [], "ok": False, "metadata": {"a": 1}}
    assert await opening(adapter, seen) == [("user", '{"price":0.0,"ok":false}')]
    assert adapter.follow({"text": "", "metadata": {"a": "é"}})[0]["content"] == '{"a":"é"}'
    assert adapter.follow({})[0]["content"] == "{}"


async def test_templates_see_the_observation_and_the_schema():
    adapter = json_adapter(system=None, first="{{ price }} {{ action_schema[:1] }}", following="")
    assert await opening(adapter, {"price": 2}) == [("user", "2 {")]
    assert adapter.follow({"price": 2})[0]["content"] == ""
    assert adapter.reject("bad") == [{"role": "user", "content": "no: bad"}]


GOOD = {"side": "buy", "amount": 3}
TEXT = json.dumps(GOOD)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("I buy three", "no JSON object"),
        ('{"side": "buy", "amount": 3', "broken"),
        ('{"side": "hold", "amount": 3}', "side: 'hold' is not one of ['buy', 'sell']"),
        ('{"side": "buy"}', "'amount' is a required property"),
        ('{"side": "buy", "amount": 11}', "amount: 11 is greater than the maximum of 10"),
        ('{"side": "buy", "amount": "3"}', "amount: '3' is not of type 'integer'"),
        ('{"side": "buy", "amount": 3, "price": 1}', "'price' was unexpected"),
        ('{"side": "buy", "amount": 3, "metadata": {}}', "'metadata' was unexpected"),
        ('{"side": "buy", "amount": 3, "limits": [{"price": "x"}]}', "limits.0.price: 'x'"),
        ('{"side": "buy", "amount": 3, "note": "long"}', "note: 'long' is too long"),
        ('{"amount": 0}', "'side' is a required property; amount: 0 is less"),
    ],
)
def test_what_is_wrong_is_told_by_the_field(reply, why):
    """Trap 21: the message names the field."""
    with pytest.raises(UnusableReply) as caught:
        json_adapter().read(reply)
    assert why.lower() in str(caught.value).lower()


def test_problems_are_told_in_few_words():
    with pytest.raises(UnusableReply) as caught:
        json_adapter().read(json.dumps({f"field{n}": "x" * 999 for n in range(99)}))
    assert len(str(caught.value)) < 800


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(st.sampled_from([*'{}[]",:\\ ', "a", "1", "e9", "NaN", "```", "\\u"])).map(
            "".join
        ),
        st.recursive(st.none() | st.text() | st.floats(), st.lists).map(json.dumps),
        st.dictionaries(st.text(), st.integers() | st.text() | st.floats()).map(json.dumps),
    )
)
@example("{" * 100_000)
@example('{"a":' * 5000)
@example('{"a":' * 5000 + "1" + "}" * 5000)
@example('{"amount": ' + "9" * 5000 + "}")
def test_no_reply_breaks_the_adapter(reply):
    """Trap 21: every reply gives an action that the schema allows and JSON can hold, or a
    reason."""
    for adapter in (json_adapter(), json_adapter({})):
        try:
            (action,) = adapter.read(reply)
        except UnusableReply as unusable:
            assert str(unusable)
        else:
            json.dumps(action, allow_nan=False).encode()


def test_a_schema_that_is_none_is_rejected_at_the_start():
    with pytest.raises(ConfigError, match="is not a JSON Schema"):
        json_adapter({"type": "objekt"})


def test_nothing_outside_of_the_schema_is_looked_up():
    adapter = json_adapter({"properties": {"a": {"$ref": "http://127.0.0.1:1/schema"}}})
    with pytest.raises(ConfigError, match="cannot be resolved"):
        adapter.read('{"a": 1}')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({}, "any"),
        ({"const": 1}, "1"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"type": "array"}, "array"),
        ({"type": "array", "prefixItems": [{"type": "integer"}, True]}, "[integer, any]"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"enum": ["x"]}}}, '"x"'),
        ({"$ref": "#/$defs/gone"}, "any"),
        ({"type": "object"}, "object"),
    ],
)
def test_kinds_of_schemas(schema, text):
    assert schema_text(schema) == text


def test_a_schema_may_contain_itself():
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert schema_text(tree).count("next") == 5
    assert schema_text({"$ref": "#"}) == "any"


def test_a_rejection_shows_a_usable_reply():
    adapter = json_adapter()
    with pytest.raises(UnusableReply) as caught:
        adapter.read("I buy three")
    _, found, example = str(caught.value).partition("; for example ")
    assert found
    assert set(adapter.read(example)[0]) == {"side", "amount"}, "only what is required"


def test_no_example_is_shown_that_the_schema_rejects():
    schema = {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[0-9]{9}x$"}},
        "required": ["code"],
    }
    with pytest.raises(UnusableReply, match=r"no JSON object in the reply$"):
        json_adapter(schema).read("?")


async def test_hidden_fields_are_not_described_but_may_be_written():
    adapter = json_adapter(hidden_fields=["note", "limits"])
    started = await adapter.open({}, None)
    assert "note" not in started.messages[0]["content"]
    assert set(started.action_schema["properties"]) == {"side", "amount"}
    assert adapter.read('{"side": "buy", "amount": 3, "note": "hi"}')[0]["note"] == "hi"


@pytest.mark.parametrize(
    ("name", "why"), [("side", "is required"), ("colour", "is no field"), ("metadata", "no field")]
)
def test_hidden_fields_must_be_optional_fields(name, why):
    with pytest.raises(ConfigError, match=f"hidden_fields: '{name}'.*{why}.*limits, note"):
        json_adapter(hidden_fields=[name])


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"price": 0, "note": "", "log": [], "step_count": 3, "metadata": {"a": 1}}, '{"price":0}'),
        ({"metadata": {"question": "why", "history": [], "episode_id": "7"}}, '{"question":"why"}'),
        ({"metadata": "words"}, '"words"'),
    ],
)
async def test_empty_fields_and_bookkeeping_are_not_shown(observation, text):
    messages = (await json_adapter(system=None).open(observation, None)).messages
    assert [message["content"] for message in messages] == [text]


def test_the_descriptions_of_an_action_and_its_parts_are_shown():
    side = {"type": "object", "description": "Which side", "properties": {"x": {"type": "string"}}}
    schema = {
        "type": "object",
        "description": "Place an order.\n\n    Only once.",
        "properties": {"side": {"$ref": "#/$defs/Side"}, "much": {"description": "a" * 5000}},
        "required": ["side"],
        "$defs": {"Side": side},
    }
    text = schema_text(schema)
    assert text.startswith("// Place an order. Only once.\n{\n")
    assert "// Which side" in text
    assert len(text) < 3000
