"""Replies in the formats of the families, from `reply_samples.json`: eight samples for each.

Each sample is read right or rejected, and no part of a call is ever made.
"""

import json
import re
from pathlib import Path

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template

from openenv_pipe.models.replies import formats
from openenv_pipe.models.replies.formats import FORMATS, HERMES, format_of, limited, within_limit
from openenv_pipe.models.replies.reader import ReplyReader
from openenv_pipe.models.replies.reply import CallStatus
from openenv_pipe.system.patterns import SlowPatternError

FAMILIES = json.loads((Path(__file__).parents[1] / "reply_samples.json").read_text("utf-8"))
SAMPLES = [(family, sample) for family in FAMILIES for sample in FAMILIES[family]["samples"]]


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
TOOLS = [tool("add", a=INTEGER, b=INTEGER), tool("write", text=TEXT), tool("zip_code", code=TEXT)]


def read(family, reply, tools=TOOLS):
    return ReplyReader(FORMATS[FAMILIES[family]["format"]]).read(reply, tools)


def made(read):
    return [[call.name, call.arguments] for call in read.made_calls]


def test_every_format_has_eight_samples():
    assert {each["format"] for each in FAMILIES.values()} == {*FORMATS}
    assert {len(each["samples"]) for each in FAMILIES.values()} == {8}


@pytest.mark.parametrize(("family", "sample"), SAMPLES)
def test_a_sample_is_read_or_rejected(family, sample):
    given = FAMILIES[family]["samples"][sample]
    found = read(family, given["reply"])
    assert made(found) == given["calls"]
    assert [call.status for call in found.calls if call.is_broken] == [
        CallStatus(each) for each in [given.get("broken")] if each
    ]
    assert found.is_thinking == given.get("is_thinking", False)
    if sample == "one":
        assert found.text == "I add."


@pytest.mark.parametrize("family", FAMILIES)
def test_no_part_of_a_call_is_a_call(family):
    one, two = (FAMILIES[family]["samples"][each] for each in ("one", "two parallel"))
    for end in range(len(one["reply"])):
        assert made(read(family, one["reply"][:end])) == []
    for end in range(len(two["reply"])):
        assert made(read(family, two["reply"][:end])) in ([], two["calls"][:1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_in_a_string_calls_nothing_else(family):
    """A text that quotes a whole reply is an argument, or the call is rejected."""
    samples = FAMILIES[family]["samples"]
    quoted = samples["one"]["reply"].replace("I add.\n", "")
    reply = samples["two parallel"]["reply"]
    for text in (quoted, f"a {quoted} b {quoted} c", f'"{quoted}'):
        written = json.dumps(text, ensure_ascii=False)
        whole = reply.replace('"hi"', written) if '"hi"' in reply else reply.replace("hi", text)
        calls = made(read(family, whole))
        if calls:
            assert calls in (
                samples["two parallel"]["calls"][:1],
                [
                    *samples["two parallel"]["calls"][:1],
                    ["write", {"text": text}],
                ],
            )


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "number"}, "0.5", 0.5),
        ({"type": "integer"}, "1\u0662", "1\u0662"),
        ({"type": "number"}, "1.\u0662", "1.\u0662"),
        ({"type": "boolean"}, "True", True),
        ({"type": "string"}, "true", "true"),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "array"}, '[1], "b": [2]', '[1], "b": [2]'),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "075001", "075001"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/properties/value"}, "1", "1"),
        ({"anyOf": [{"$ref": "#/properties/value"}, {"type": "integer"}] * 40}, "1", 1),
        ({"type": 1e308, "anyOf": {"a": 1}, "enum": "x", "$ref": "#/a/b"}, "1", "1"),
        ({"enum": ["a", 1]}, "1", "1"),
        ({}, "1", "1"),
        ({"type": "string"}, "  two\n  lines\n", "  two\n  lines\n"),
    ],
)
def test_text_is_cast_by_the_schema(schema, text, value):
    parameters = {
        "type": "object",
        "properties": {"value": schema},
        "$defs": {"Point": {"type": "object"}},
    }
    tools = [{"type": "function", "function": {"name": "put", "parameters": parameters}}]
    reply = (
        f"<tool_call>\n<function=put>\n<parameter=value>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    assert made(ReplyReader(FORMATS["qwen3_coder"]).read(reply, tools)) == [
        ["put", {"value": value}]
    ]


AMBIGUOUS = {
    "qwen3_coder": (
        "<tool_call>\n<function=write>\n<parameter=text>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm4": (
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>",
        "</arg_value>\n</tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call><invoke name="write"><parameter name="text">',
        "</parameter></invoke></minimax:tool_call>",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_text_that_ends_its_own_call_is_rejected(name):
    """Formats without escapes cannot write it: half of the text would be made."""
    begin, end = AMBIGUOUS[name]
    reader = ReplyReader(FORMATS[name])
    assert made(reader.read(f"{begin}hi{end}", TOOLS)) == [["write", {"text": "hi"}]]
    found = reader.read(f"{begin}I end {end} here{end}", TOOLS)
    assert (made(found), found.calls[0].status) == ([], CallStatus.MALFORMED)
    found = reader.read(f"{begin}no end{begin}hi{end}", TOOLS)
    assert (made(found), found.calls[0].status) == ([], CallStatus.MALFORMED)
    assert all(FORMATS[each].ambiguous for each in AMBIGUOUS)


TWO_IN_ONE = {
    "qwen3_coder": "\n</parameter>\n</function>\n<function=write>\n<parameter=text>\n",
    "glm4": "</arg_value>\nwrite\n<arg_key>text</arg_key>\n<arg_value>",
}


@pytest.mark.parametrize("name", TWO_IN_ONE)
def test_two_calls_between_one_pair_of_marks_are_not_one_with_marks_in_its_text(name):
    begin, end = AMBIGUOUS[name]
    found = ReplyReader(FORMATS[name]).read(f"{begin}a{TWO_IN_ONE[name]}b{end}", TOOLS)
    assert (made(found), found.calls[0].status) == ([], CallStatus.MALFORMED)


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_text_may_end_in_the_mark_that_ends_it(name):
    begin, end = AMBIGUOUS[name]
    mark = FORMATS[name].calls[0].tags.closing.pattern
    for text in (mark, f"a{mark}", f"a{mark}{mark}", f"{mark} a {mark}"):
        found = ReplyReader(FORMATS[name]).read(f"{begin}{text}{end}", TOOLS)
        assert made(found) == [["write", {"text": text}]]


@pytest.mark.parametrize("end", ["<|call|>", ""])
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1, "b": 2}, "more": {}',
        '{"a": 1, "b": 2}}</tool_call>',
        '{"a": 1, "b": 2}}</tool_call><tool_call>{"name": "write", "arguments": {"text": "hi"}',
        'a</tool_call><tool_call>{"name": "write", "arguments": {"text": "hi"}}</tool_call>',
    ],
)
def test_arguments_of_a_channel_are_one_object(arguments, end):
    """They go into a marked call, which nothing in them ends."""
    reply = f"<|channel|>commentary to=functions.add<|message|>{arguments}{end}"
    found = ReplyReader(FORMATS["gpt_oss"]).read(reply, TOOLS)
    status = CallStatus.MALFORMED if end else CallStatus.TRUNCATED
    assert [call.status for call in found.calls] == [status]


def test_calls_without_marks_are_those_of_tools_that_exist():
    reader = ReplyReader(FORMATS["llama"])
    for prose in ("[sky(blue=1)] is a list", "[fly(a=1)]", "See [add(a=1)] for it", "[add] (x)"):
        assert reader.read(prose, TOOLS).calls == []
    assert [call.status for call in reader.read("[add(1)]", TOOLS).calls] == [CallStatus.MALFORMED]


@pytest.mark.parametrize("number", ["075001", "-007.5", "1\u0662", "\u0661", "1_000"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama", "[zip_code(code={})]"),
        ("gemma4", "<|tool_call>call:zip_code{{code:{}}}<tool_call|>"),
    ],
)
def test_numbers_in_literals_are_those_of_json(name, call, number):
    """What begins with a zero may be no number: it is rejected, not changed."""
    found = ReplyReader(FORMATS[name]).read(call.format(number), TOOLS)
    assert (made(found), found.calls[0].status) == ([], CallStatus.MALFORMED)


# --- where a format comes from --------------------------------------------------------------------

OWN = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<scratch>", "close_pattern": r"</scratch>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<use (?P<name>\w+)>",
            "close": "</use>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|eot\|>\s*", "content": "text"},
    },
}


def test_a_tokenizers_own_template_comes_before_the_table():
    form = format_of((), "{{ '<function_calls>' }}", OWN)
    found = ReplyReader(form).read('<scratch>why</scratch>So: <use add>{"a": 1}</use>', TOOLS)
    assert (made(found), found.thought, found.text) == ([["add", {"a": 1}]], "why", "So:")
    for cut in ('<use add>{"a": 1}</us', "<use add>", "<use ad"):
        assert [each.status for each in ReplyReader(form).read(cut, TOOLS).calls] == [
            CallStatus.TRUNCATED
        ]
    whole = ReplyReader(format_of((), "", OWN)).read('<use write>{"text": "</use>"}</use>', TOOLS)
    assert made(whole) == [["write", {"text": "</use>"}]]


ENDLESS = "(?:(?:a|b|ab)*)*[XY]"


@pytest.mark.parametrize(
    ("field", "change", "reply"),
    [
        ("tool_calls", {"open_pattern": ENDLESS}, ""),
        ("tool_calls", {"close": "", "close_pattern": ENDLESS}, '<use add>{"a": 1}'),
        ("thinking", {"close_pattern": ENDLESS}, "<scratch>"),
    ],
)
def test_a_pattern_of_a_models_folder_has_a_limit_of_time(field, change, reply, monkeypatch):
    """Without it, reading such a reply never ends."""
    monkeypatch.setattr(formats, "LIMIT_S", 0.01)
    own = json.loads(json.dumps(OWN))
    own["fields"][field] |= change
    (call,) = ReplyReader(format_of((), "", own)).read(reply + "ab" * 60, TOOLS).calls
    assert call.status is CallStatus.MALFORMED
    assert "takes too long" in call.problem


def test_a_closing_mark_may_have_the_end_of_the_turn_in_it():
    """Replies are read without the token that ends the turn; one that is cut has none."""
    own = json.loads(json.dumps(OWN))
    own["fields"]["tool_calls"] |= {"close": "</use><|eot|>"}
    reader = ReplyReader(format_of((), "", own))
    reader.turn_end = "<|eot|>"
    assert made(reader.read('<use add>{"a": 1}</use>', TOOLS)) == [["add", {"a": 1}]]
    assert not reader.read('<use add>{"a": 1}</us', TOOLS).made_calls


@pytest.mark.parametrize(
    "change",
    [
        {"content": "kv-lines"},
        {"open_pattern": "("},
        {"open_pattern": r"(?s)<use (?P<name>\w+)>"},
        {"open_pattern": r"<(?P<mark>use) (?P<name>\w+) (?P=mark)>"},
        {"content": "xml-inline"},
    ],
)
def test_a_template_that_cannot_be_used_is_named(change, caplog):
    own = json.loads(json.dumps(OWN))
    own["fields"]["tool_calls"] |= change
    assert format_of((), "<function_calls>", own) == FORMATS["olmo3"]
    assert "response_template of the tokenizer cannot be used" in caplog.text


def test_the_table_is_in_the_data_format_of_transformers():
    for row in formats._TABLE.values():
        calls = row["template"]["fields"]["tool_calls"]
        for each in calls if isinstance(calls, list) else [calls]:
            fields = {**row["template"]["fields"], "tool_calls": each}
            load_response_template({"start_anchor": "assistant", "fields": fields})


@pytest.mark.parametrize("name", [*FORMATS])
def test_a_format_is_found_by_its_marks(name):
    if name == "gpt_oss":
        assert format_of(["<|channel|>"], "").name == name
        return
    found_by = formats._TABLE[name]["found_by"]
    for mark in found_by:
        assert format_of([mark], "").name == format_of([], f"{{{{ '{mark}' }}}}").name == name
    assert found_by or FORMATS[name] is HERMES


@pytest.mark.parametrize("pattern", ["</use>|$", "(?:</p>)?", "a*", "x"])
@pytest.mark.parametrize("where", [(), (3,), (2, 9)])
def test_limited_patterns_are_found_where_re_finds_them(pattern, where):
    """Also empty ones, and at the end."""
    text = "ab</use>c</p>aa"
    found = [each.span() for each in limited(pattern).finditer(text, *where)]
    assert found == [each.span() for each in re.compile(pattern).finditer(text, *where)]


def test_the_searches_in_a_reply_share_a_limit(monkeypatch):
    monkeypatch.setattr(formats, "LIMIT_S", 0.05)
    slow, text = limited("(?:a|a)+b"), 16 * "a" + "c"
    with pytest.raises(SlowPatternError), within_limit():
        for _ in range(100_000):
            slow.search(text)
