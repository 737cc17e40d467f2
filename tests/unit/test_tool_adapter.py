"""Adapter `tool`: listing tools, reading calls, showing results. Trap numbers: tests/README.md."""

import json

import pytest
from fakes import TEMPLATES, ChatOnly, FakeHost, collect, run_config
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openenv_pipe.config.schema import ToolAdapterConfig
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.adapters import UnusableReply, build_adapter
from openenv_pipe.environments.adapters.tool import result_text
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.client.session import LIST_TOOLS
from openenv_pipe.errors import ConfigError, SessionError, StepRejectedError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.types import Status

LISTED = {
    "metadata": {},
    "tools": [
        {"name": "add", "description": "A sum.", "input_schema": {"type": "object", "a": 1}},
        {"name": "stop", "description": "", "input_schema": {}},
    ],
}


def tool_adapter_values(**changes):
    return {"type": "tool", "plain_reply": "unusable", **TEMPLATES, **changes}


def test_an_example_that_calls_a_tool_is_rejected():
    """Control tokens in examples are broken up, so the model would learn calls that are none."""
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    examples = [{"user": "2 + 2?", "reply": "4"}, {"user": "1 + 1?", "reply": call}]
    with pytest.raises(ConfigError, match=r"env\.adapter\.examples\.1\.reply=.* has a tool call"):
        build_adapter(ToolAdapterConfig(**tool_adapter_values(examples=examples)))


def tool_adapter(**changes):
    return build_adapter(ToolAdapterConfig.model_validate(tool_adapter_values(**changes)))


def answering(answer):
    """Return an `ask` that returns this answer, or raises it."""

    async def ask(action):
        assert action == LIST_TOOLS
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def call(name, **arguments):
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


async def test_tools_are_listed_at_reset():
    adapter = tool_adapter(system="Use {{ metadata.what }}.")
    opening = await adapter.open({"metadata": {"what": "tools"}}, answering(LISTED))
    assert opening.messages == [
        {"role": "system", "content": "Use tools."},
        # the environment offered only its metadata
        {"role": "user", "content": '{"what":"tools"}'},
    ]
    add, stop = (tool["function"] for tool in opening.tools)
    assert add == {
        "name": "add",
        "description": "A sum.",
        "parameters": {"type": "object", "a": 1},
    }
    assert stop["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (StepRejectedError("VALIDATION_ERROR", "no type"), ConfigError, "no type"),
        ({"text": "what?"}, ConfigError, "what?"),
        ({"tools": []}, ConfigError, "MCP tools"),
        ({"tools": [{"title": "add"}]}, ConfigError, "MCP tools"),
        ({"tools": [], "metadata": {"error": "gone"}}, SessionError, "gone"),
        (StepRejectedError("EXECUTION_ERROR", "no step"), StepRejectedError, "no step"),
    ],
)
async def test_an_environment_without_tools_is_a_mistake_of_the_configuration(answer, error, why):
    with pytest.raises(error, match=why):
        await tool_adapter().open({}, answering(answer))


@pytest.mark.parametrize("reply", ["", "The answer is 4.", '{"answer": 4}', '{"name": "add"}'])
def test_a_reply_without_a_call_is_the_last_or_a_mistake(reply):
    assert tool_adapter(plain_reply="final").read(reply) == []
    with pytest.raises(UnusableReply, match="no tool call"):
        tool_adapter().read(reply)


PIECES = ["<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', "{", "}", '"', "x", "\n"]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES)).map("".join)))
@example("<tool_call>" * 10_000)
@example('{"name": "a", "arguments": ' + '{"a":' * 5000)
def test_no_reply_breaks_the_adapter(reply):
    """Trap 21: every reply gives calls that JSON can hold, or a reason."""
    try:
        calls = tool_adapter().read(reply)
    except UnusableReply as unusable:
        assert str(unusable)
    else:
        assert calls
        json.dumps(calls, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"result": None, "error": {"error_type": "x", "message": "Unknown tool"}}, "Unknown tool"),
        ({"result": None, "error": "lost"}, "Error: lost"),
        ({"result": {"content": [{"type": "text", "text": "3"}], "data": 3}}, "3"),
        ({"result": {"content": [{"text": "a"}, {"type": "image", "n": 1}]}}, 'a\n{"type":"image"'),
        ({"result": {"content": [], "data": None}}, ""),
        ({"result": {"sum": 3}}, '{"sum":3}'),
        ({"result": "three"}, "three"),
        ({"result": 0}, "0"),
        ({"won": True, "tool_name": ""}, '{"won":true}'),
    ],
)
def test_what_a_call_gave_is_told(observation, text):
    assert text in result_text(observation)
    (message,) = tool_adapter().follow({"tool_name": "add", **observation})
    assert (message["role"], message["name"]) == ("tool", observation.get("tool_name", "add"))


def test_a_template_may_tell_it_otherwise():
    adapter = tool_adapter(following="{{ tool_name }}: {{ result }}")
    assert adapter.follow({"tool_name": "add", "result": 3})[0]["content"] == "add: 3"
    assert adapter.reject("x") == [{"role": "user", "content": "no: x"}]


# --- episodes -----------------------------------------------------------------------------------

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CHAT = ChatFormat(build_tokenizer())


def counter(seed, number, action):
    """Answer each call with the number of calls and a reward of 0.25; the third ends the
    episode."""
    if action.get("type") == "list_tools":
        return StepResult(LISTED, 9.0, done=False)
    if action.get("tool_name") == "sleep":
        raise StepRejectedError("VALIDATION_ERROR", "no sleep")
    count = number - 1  # the first step has listed the tools
    return StepResult({"result": str(count), "tool_name": "add"}, 0.25, done=count == 3)


async def played(*replies, plain_reply="unusable", max_tokens=500):
    """Play one episode with these replies."""
    adapter = tool_adapter_values(plain_reply=plain_reply)
    limits = {"env.max_reply_tokens": 200, "env.max_episode_tokens": max_tokens}
    seen = iter(replies)
    engine = ScriptedEngine(lambda observations, draw: next(seen))
    (group,) = await collect(
        ChatOnly(CHAT),
        engine=engine,
        host=FakeHost(counter),
        config=run_config({"env.adapter": adapter} | limits),
        num_tasks=1,
        group_size=1,
    )
    return group.episodes[0]


async def test_several_calls_of_a_reply_are_made_in_their_order():
    episode = await played(ADD + ADD, ADD + ADD)
    assert (episode.status, episode.error) == (Status.DONE, None)
    first, second = episode.turns
    assert [step.observation["result"] for step in first.steps] == ["1", "2"]
    assert [step.action for step in first.steps] == [call("add", a=1)] * 2
    assert (first.reward, second.reward) == (0.5, 0.25)
    # the episode ended with the first call, so the second was not made
    assert len(second.steps) == 1
    assert CHAT.reply_text(second.prompt_ids) == "<|user|>1<|user|>2<|assistant|>"
    assert CHAT.reply_text(first.prompt_ids).startswith("<|system|>add()\nstop()\n<|user|>")


async def test_a_broken_call_does_not_discard_the_others():
    """The model reads their results, and then what is wrong with the broken one."""
    broken = ADD.replace("}}", "}")
    episode = await played(ADD + broken + ADD, ADD)
    first, second = episode.turns
    assert [step.observation["result"] for step in first.steps] == ["1", "2"]
    assert first.unusable.startswith("tool call 2: the JSON is broken")
    assert CHAT.reply_text(second.prompt_ids) == (
        f"<|user|>1<|user|>2<|user|>no: {first.unusable}<|assistant|>"
    )
    assert (episode.status, len(second.steps)) == (Status.DONE, 1)


async def test_a_call_that_is_rejected_ends_its_reply_and_not_the_episode():
    """Trap 21."""
    sleep = ADD.replace("add", "sleep")
    episode = await played(ADD + sleep + ADD, ADD + ADD)
    first, second = episode.turns
    assert (len(first.steps), first.reward) == (1, 0.25)
    assert "no sleep" in first.unusable
    assert CHAT.reply_text(second.prompt_ids) == (
        "<|user|>1<|user|>no: VALIDATION_ERROR: no sleep<|assistant|>"
    )
    assert episode.status is Status.DONE


async def test_a_plain_reply_ends_the_episode_where_it_may():
    episode = await played(ADD, "It is one.", plain_reply="final")
    assert (episode.status, episode.truncated, episode.failed) == (Status.ANSWERED, False, False)
    assert (episode.turns[1].steps, episode.turns[1].unusable) == ([], None)


async def test_tools_longer_than_an_episode_are_a_mistake_of_the_configuration():
    with pytest.raises(ConfigError, match=r"2 tools take 14 tokens.*max_episode_tokens=10"):
        await played(max_tokens=10)
    episode = await played(max_tokens=16)  # the tools fit, but the first message does not
    assert (episode.status, episode.turns) == (Status.TOKEN_LIMIT, [])
