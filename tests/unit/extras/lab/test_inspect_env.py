"""Which adapter fits which schemas, and that the env block written for it composes."""

from dataclasses import replace

import pytest
import yaml

from openenv_pipe.config.compose import compose_env
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.client.metadata import ServerMetadata
from openenv_pipe.extras.lab.chat_prompts import adapter_block
from openenv_pipe.extras.lab.inspect import env_block

METADATA = {"metadata": {"type": "object"}}
QUOTE = {"properties": {**METADATA, "done": {}, "text": {}, "turn": {}, "correct_answer": {}}}


def description(fields, **keys):
    action = {"type": "object", "properties": {**METADATA, **fields}, **keys}
    return ServerMetadata(
        name="My Env",
        text="Two\nlines: of {{ text }}",
        action=action,
        first_observation={"properties": {"text": {}}},
        observation=QUOTE,
    )


@pytest.mark.parametrize(
    ("fields", "kind", "pattern"),
    [
        ({"text": {"type": "string"}}, "text", r"(?s)(?P<text>\S(?:.*\S)?)"),
        ({"move": {"$ref": "#/$defs/Move"}}, "text", r"\b(?P<move>a|b\.c)\b"),
        ({"amount": {"type": "integer"}}, "json", None),
        ({"text": {"type": "string"}, "amount": {"type": "integer"}}, "json", None),
        ({"a-b": {"type": "string"}}, "json", None),
        ({"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}}, "tool", None),
        ({}, "tool", None),
    ],
)
def test_the_action_decides_the_adapter(tmp_path, monkeypatch, fields, kind, pattern):
    move = {"type": "string", "enum": ["a", "b.c"], "description": "Where to"}
    found = description(fields, **{"$defs": {"Move": move}})
    assert adapter_block(found)[0] == kind
    assert adapter_block(found)[1].get("pattern") == pattern
    monkeypatch.chdir(tmp_path)
    env = compose_env(["env=echo", "env.package=null", "env.command=[serve,'{port}']"]).env
    text = env_block(found, env)
    (tmp_path / "conf/env").mkdir(parents=True)
    (tmp_path / "conf/env/mine.yaml").write_text(text)
    written = compose_env(["env=mine"]).env
    assert (written.name, written.command) == ("my_env", ["serve", "{port}"])
    assert written.adapter.type == kind
    players = (
        {}
        if kind == "text"
        else {"random": "openenv_pipe.environments.random_policy:random_action"}
    )
    assert written.baselines == players
    if kind == "text":
        assert written.adapter.system.startswith("Reply with the ")
        assert ("a, b.c. Where to" in written.adapter.system) is ("move" in fields)
        assert written.adapter.first == "{{ text }}"
        assert yaml.safe_load(text)["adapter"]["following"] == "text: {{ text }}\nturn: {{ turn }}"


HOSTILE = (
    "\x00\x1b[2J\x9b\u202e ${oc.env:HOME} {{ 7 * 7 }} {{{ {% raw %} {# #} $${{x\ntasks: {}\n" * 3
)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"type": "string", "description": HOSTILE}},
        {"text": {"type": "string", "enum": [HOSTILE, "${oc.env:HOME}"], "description": "a"}},
        {"text": {"type": "string", "enum": ["${oc.env:HOME}", "{{ 7 * 7 }}"]}},
        {"text": {"type": "string", "enum": [1, None, {}]}},
        {"text": {"type": "string", "enum": []}},
        {HOSTILE: {"type": "string"}, "b": {"type": "integer", "description": HOSTILE}},
    ],
)
def test_a_servers_words_mean_nothing_in_a_configuration(tmp_path, monkeypatch, fields):
    monkeypatch.setenv("HOME", "/a/secret/folder")
    monkeypatch.chdir(tmp_path)
    directives = "@package _global_\n # @package _group_\n"
    found = replace(description(fields), name=HOSTILE * 9, text=directives + HOSTILE * 1000)
    (tmp_path / "conf/env").mkdir(parents=True)
    env = compose_env(["env=echo", "env.package=null", "env.command=[serve,'{port}']"]).env
    (tmp_path / "conf/env/mine.yaml").write_text(env_block(found, env))
    written = compose_env(["env=mine"]).env
    assert len(written.name) <= 60
    assert "secret" not in written.model_dump_json()
    if written.adapter.type == "text":
        said = build_adapter(written.adapter)._system.render({"x": "x"})
        assert "{ { 7 * 7 }}" in said or "{{" not in written.adapter.system
        assert "49" not in said
