"""One reader of replies behind four doors: the loop's tools, programs, served models, JSON actions.

Trap numbers: tests/README.md.
"""

import copy
import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from fakes import TEMPLATES, FakeHost, collect, run_config
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import RepliesEngine, agent_config, play_episodes, programs_context

from openenv_pipe.config.schema import JsonAdapterConfig, ToolAdapterConfig
from openenv_pipe.engines.openai.messages import endpoint_messages
from openenv_pipe.environments.adapters import UnusableReply, build_adapter
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.extras.agents.calls import Connection
from openenv_pipe.extras.agents.http.chat_completions import read_request, reply_message
from openenv_pipe.extras.agents.serving.served_model import ServedModel
from openenv_pipe.extras.judges.judge import UnusableAnswerError, json_object, number_of
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.replies.formats import FORMATS, HARMONY, HERMES
from openenv_pipe.models.replies.reader import PLAIN_READER, ReplyReader
from openenv_pipe.models.replies.reply import CallStatus
from openenv_pipe.models.tiny import CHAT_TEMPLATE, build_tokenizer
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.untrusted_text import (
    code_block,
    code_span,
    for_markdown,
    for_people,
)
from openenv_pipe.types import Status

NAMES = ("add", "say", "stop")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}}
    for name in NAMES
]


def chat_format(form: str) -> ChatFormat:
    """Return a chat format of the tiny tokenizer: plain, opened (a thought), or channels."""
    tokenizer = build_tokenizer()
    if form == "opened":
        begun = "<|assistant|>{% endif %}"
        assert CHAT_TEMPLATE.endswith(begun)
        template = CHAT_TEMPLATE.removesuffix(begun) + "<|assistant|><think>\n{% endif %}"
        tokenizer.chat_template = template
    if form == "channels":
        marks = ("start", "channel", "message", "return", "call", "constrain")
        added = [f"<|{mark}|>" for mark in marks]
        tokenizer.add_special_tokens({"additional_special_tokens": added})
    return ChatFormat(tokenizer, "rerender")


CHATS = {form: chat_format(form) for form in ("plain", "opened", "channels")}


def marked(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def bare(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@dataclass(frozen=True, kw_only=True)
class Case:
    reply: str
    calls: tuple = ()  # (name, arguments) of those that are to be made, by all doors
    why: str = ""  # what the loop tells the model about the rest
    # The last object outside of thoughts, which is the action of the adapter `json`; the first word
    # of why there is none.
    last: object = "same"  # as the last call
    form: str = "plain"


def case(reply: str, *calls: tuple, **more: object) -> Case:
    return Case(reply=reply, calls=calls, **more)


ADD, STOP = ("add", {"a": 1}), ("stop", {})
DRAFT = bare("stop")
MARKS = '</tool_call> </think> <think> <tool_call> " \\ {} é \n'
CASES = {
    # --- what is read ---
    "marked": case(marked("add", a=1), ADD),
    "lines": case(
        'I add.\n<tool_call>\n{"name": "add",\n "arguments": {"a": 1}}\n</tool_call>\nDone.', ADD
    ),
    "parallel": case(marked("add", a=1) + "\n" + marked("stop"), ADD, STOP),
    "bare": case("I call " + bare("add", a=1) + " now", ADD),
    "bare, in a list": case(f"[{bare('add', a=1)}, {bare('stop')}]", ADD, STOP),
    "parameters": case(
        '{"name": "add", "parameters": {"a": 1}}', ADD, last={"name": "add", "parameters": {"a": 1}}
    ),
    "a fence": case(f"```json\n{bare('add', a=1)}\n```", ADD),
    "a fence in marks": case(f"<tool_call>\n```json\n{bare('add', a=1)}\n```\n</tool_call>", ADD),
    "arguments as text": case(
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ADD,
        last={"name": "add", "arguments": '{"a": 1}'},
    ),
    "bare, arguments as text": case(
        '{"name": "add", "arguments": " {\\"a\\": 1} "}',
        ADD,
        last={"name": "add", "arguments": ' {"a": 1} '},
    ),
    "a number as text": case(marked("add", a="1"), ("add", {"a": "1"})),
    "an object beside marked calls": case(
        bare("stop") + marked("add", a=1) + '{"name"', ADD, last="the"
    ),
    # --- strings ---
    "marks in a string": case(marked("say", text=MARKS), ("say", {"text": MARKS})),
    "marks in a bare string": case(bare("say", text=MARKS), ("say", {"text": MARKS})),
    "a call in a string": case(
        marked("say", text=marked("stop")), ("say", {"text": marked("stop")})
    ),
    "a call in a bare string": case(
        bare("say", text=marked("stop") + DRAFT), ("say", {"text": marked("stop") + DRAFT})
    ),
    "escapes": case(
        '<tool_call>{"name": "\\u0061dd", "arguments": {"a": 1, "text": "\\ud83d\\ude00\\/"}}'
        "</tool_call>",
        ("add", {"a": 1, "text": "😀/"}),
    ),
    # --- thoughts ---
    "a draft in a thought": case(
        f"<think>{DRAFT}{marked('stop')}</think>{marked('add', a=1)}", ADD
    ),
    "a thought that names its end": case(
        f"<think>It ends by </think>. Draft: {marked('stop')} So:</think>{bare('add', a=1)}", ADD
    ),
    "an end mark in a draft": case(
        f"<think>{bare('say', text='</think>')}{DRAFT}</think>{bare('add', a=1)}", ADD
    ),
    "several thoughts": case(
        f"<think>a</think>{marked('add', a=1)}<think>{DRAFT}</think>{marked('stop')}", ADD, STOP
    ),
    "a thought begun in the prompt": case(
        f"perhaps {DRAFT} or {marked('stop')}\n</think>\n\n{bare('add', a=1)}", ADD
    ),
    "an open thought": case(
        f"<think>Perhaps {DRAFT} would do, but", why="inside a thought", last="the"
    ),
    "an open thought behind a call": case(f"{marked('add', a=1)}<think>{marked('stop')}", ADD),
    "only a thought": case(f"<think>{DRAFT}</think>", last="there"),
    # --- truncated ---
    "cut before the mark": case(
        marked("add", a=1).removesuffix("</tool_call>"), why="not closed", last=ADD
    ),
    "cut in the JSON": case(marked("add", a=1)[:-15], why="broken", last="the"),
    "cut in a string": case(marked("say", text="xxxx")[:-18], why="Unterm", last="the"),
    "cut, bare": case(bare("add", a=1)[:-1], why="broken", last="the"),
    "the second is cut": case(
        marked("add", a=1) + marked("stop")[:-14], ADD, why="call 2", last="the"
    ),
    # --- malformed: the others count ---
    "no object": case("<tool_call>add(1)</tool_call>" + marked("stop"), STOP, why="call 1"),
    "a comma": case(marked("add", a=1).replace("}}", "},}") + marked("stop"), STOP, why="call 1"),
    "a missing brace": case(
        marked("add", a=1).replace("}}", "}") + marked("stop"), STOP, why="call 1"
    ),
    "a missing quote": case(
        marked("add", a=1).replace("add", 'add"').replace('"add', "add") + marked("stop"),
        STOP,
        why="call 1",
    ),
    "not closed": case("<tool_call>" + bare("add", a=1) + marked("stop"), STOP, why="not closed"),
    "two in one": case(
        f"<tool_call>{DRAFT}{DRAFT}</tool_call>{marked('add', a=1)}", ADD, why="not one object"
    ),
    "no name": case('<tool_call>{"arguments": {}}</tool_call>' + marked("stop"), STOP, why="form"),
    "arguments of another type": case(
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>' + marked("stop"),
        STOP,
        why="form",
    ),
    "arguments as broken text": case(
        '<tool_call>{"name": "add", "arguments": "{a: 1}"}</tool_call>' + marked("stop"),
        STOP,
        why="form",
    ),
    "a key twice": case(
        '<tool_call>{"name": "stop", "arguments": {"a": 1, "a": 2}}</tool_call>',
        why="'a' is there more than once",
        last="the",
    ),
    "a name twice": case(
        '{"name": "stop", "name": "add", "arguments": {}}', why="'name'", last="the"
    ),
    "NaN": case(bare("add", a=float("nan")), why="NaN", last="the"),
    "infinite": case(
        marked("add", a=1).replace("1", "1e999"), why="1e999 is not a number", last="the"
    ),
    "a huge integer": case(
        marked("add", a=1).replace("1", "9" * 5000), why="5000 digits", last="the"
    ),
    "deep": case(marked("add", a=1).replace("1", "[" * 70 + "]" * 70), why="nests", last="the"),
    "very deep": case(
        marked("add", a=1).replace("1", "[" * 9000 + "]" * 9000) + marked("stop"), STOP, why="nests"
    ),
    "half a pair": case(marked("say", text="\ud800"), why="not Unicode", last="the"),
    "the first bare one is broken": case(
        bare("add", a=1).replace("1", "'1'") + "\n" + DRAFT, STOP, why="call 1"
    ),
    "inside of a broken one": case(
        f'{{"name": "say", "arguments": {{"x": \'1\', "then": {DRAFT}}}}}', why="broken", last="the"
    ),
    "inside of a broken string": case(
        marked("say", text=marked("stop") + DRAFT).replace("}}</", "},}</"),
        why="call 1",
        last="the",
    ),
    # --- the tools are known ---
    "an unknown tool": case(marked("fly"), ("fly", {})),
    "an object that looks like a call": case(
        'The answer is {"name": "Bob", "parameters": {"age": 3}}.',
        last={"name": "Bob", "parameters": {"age": 3}},
    ),
    "an unknown and a known object": case(bare("Bob") + bare("stop"), STOP),
    # --- no call ---
    "text": case("The set {1, 2} is what {I} say.", last="there"),
    "empty": case("", last="there"),
    "another object": case('{"answer": 4}', last={"answer": 4}),
    # --- the prompt opens a thought ---
    "opened, not ended": case(
        f"Perhaps {DRAFT}{marked('stop')}", why="inside a thought", last="the", form="opened"
    ),
    "opened, ended": case(f"{DRAFT}</think>{marked('add', a=1)}", ADD, form="opened"),
    "opened, begun again": case(f"<think>{DRAFT}</think>{bare('add', a=1)}", ADD, form="opened"),
    # --- channels ---
    "channels": case(
        f"<|channel|>analysis<|message|>{DRAFT}{marked('stop')}<|end|><|start|>assistant"
        f"<|channel|>final<|message|>{marked('add', a=1)}",
        ADD,
        form="channels",
    ),
    "channels, bare": case(
        f"<|channel|>analysis<|message|>{DRAFT}<|end|><|start|>assistant"
        f"<|channel|>final<|message|>{bare('add', a=1)}",
        ADD,
        form="channels",
    ),
    "channels, a recipient": case(
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        ADD,
        form="channels",
    ),
    "channels, a recipient of the role": case(
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
        "<|call|><|start|>assistant<|channel|>commentary to=functions.stop<|message|>{}<|call|>",
        ADD,
        STOP,
        form="channels",
    ),
    "channels, a recipient before any mark": case(
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        ADD,
        form="channels",
    ),
    "channels, a channel named twice": case(
        "<|channel|>commentary to=functions.add<|channel|>commentary json<|message|>"
        '{"a": 1}<|call|><|start|>assistant<|channel|>commentary to=functions.stop<|message|>{}'
        "<|call|>",
        ADD,
        STOP,
        form="channels",
    ),
    "channels, a call without a recipient": case(
        '<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        why="it is not one object",
        last={"a": 1},
        form="channels",
    ),
    "channels, a mark in a string": case(
        '<|channel|>commentary to=functions.say<|message|>{"text": "<|call|> \\" <|end|>"}<|call|>',
        ("say", {"text": '<|call|> " <|end|>'}),
        form="channels",
    ),
    "channels, the words of a mark before a call": case(
        "<|channel|>commentary<|message|>I put it in <think> tags.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>',
        ADD,
        form="channels",
    ),
    "channels, the words of a mark after a call": case(
        '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|><|start|>assistant'
        "<|channel|>final<|message|>Close it with </think>, please.",
        ADD,
        form="channels",
    ),
    "channels, cut": case(
        '<|channel|>commentary to=functions.add<|message|>{"a": 1}',
        why="broken",
        last="the",
        form="channels",
    ),
    "channels, an open thought": case(
        f"<|channel|>analysis<|message|>Perhaps {DRAFT}{marked('stop')}",
        why="inside a thought",
        last="the",
        form="channels",
    ),
    "channels, one of two is broken": case(
        "<|channel|>commentary to=functions.add<|message|>{a: 1}<|call|><|start|>assistant"
        "<|channel|>commentary to=functions.stop<|message|>{}<|call|>",
        STOP,
        why="call 1",
        form="channels",
    ),
    "marks of channels in text": case(f"<|channel|>analysis<|message|>{bare('add', a=1)}", ADD),
}
by_case = pytest.mark.parametrize("name", CASES)


def answers(seed, number, action):
    if action.get("type") == "list_tools":
        return StepResult({"tools": [tool["function"] for tool in TOOLS]}, 0.0, False)
    return StepResult({"result": "ok", "tool_name": "x"}, 0.0, False)


async def turn_of(case, adapter):
    """Play a turn with this reply in the pipeline's loop."""
    chat = CHATS[case.form]
    limits = {"env.max_reply_tokens": 40_000, "env.max_episode_tokens": 100_000}
    limits |= {"env.max_turns": 1, "model.max_length": 100_000}
    config = run_config({"env.adapter": adapter, **limits})
    policy = type("Policy", (), {"chat": chat})
    engine = RepliesEngine(chat, case.reply)
    options = {"host": FakeHost(answers), "config": config, "num_tasks": 1, "group_size": 1}
    (group,) = await collect(policy, engine=engine, **options)
    (episode,) = group.episodes
    assert episode.error is None
    assert episode.turns[0].reply == encodable(case.reply)
    return episode


def encodable(text):
    return text.encode(errors="replace").decode()


@by_case
async def test_the_loop_makes_the_calls_of_a_reply(name):
    case = CASES[name]
    episode = await turn_of(case, {"type": "tool", "plain_reply": "final", **TEMPLATES})
    (turn,) = episode.turns
    assert [(step.action["tool_name"], step.action["arguments"]) for step in turn.steps] == [
        *case.calls
    ]
    assert case.why in (turn.unusable or ""), turn.unusable
    assert bool(case.why) == (turn.unusable is not None)
    is_answer = not case.calls and not case.why
    assert episode.status is (Status.ANSWERED if is_answer else Status.TURN_LIMIT)


@by_case
async def test_the_last_object_of_a_reply_is_its_action(name):
    case = CASES[name]
    adapter = {"type": "json", "hidden_fields": [], **TEMPLATES}
    (turn,) = (await turn_of(case, adapter)).turns
    expected = case.calls[-1] if case.last == "same" else case.last
    if isinstance(expected, tuple):
        expected = {"name": expected[0], "arguments": expected[1]}
    if isinstance(expected, str):
        assert (turn.steps, turn.unusable.split()[0]) == (
            [],
            "the" if expected == "broken" else expected,
        )
    else:
        assert [step.action for step in turn.steps] == [expected]


@by_case
async def test_a_served_model_answers_with_the_calls_of_a_reply(name):
    case = CASES[name]
    chat = CHATS[case.form]
    model = ServedModel(
        RepliesEngine(chat, case.reply), chat, name="m", max_tokens=100_000, notify=pytest.fail
    )
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
    answer = await model.complete(body, Connection())
    check_message(answer["choices"][0]["message"], case)


def check_message(message, case):
    """Check the calls, and that nothing else of the reply is lost to who gets the message."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [*case.calls]
    read = CHATS[case.form].reply_reader.read(encodable(case.reply), TOOLS)
    content = message["content"] or ""
    for call in read.calls:
        assert call.is_made == (read.visible[slice(*call.span)] not in content)
    if not case.calls:
        assert content == read.visible


PROGRAM = """
import json
tools = json.loads({tools!r})
with open({path!r}, "w") as file:
    for _ in range({number}): print(json.dumps(ask([user("?")], tools=tools)), file=file)
"""


async def test_a_program_gets_the_calls_of_replies(tmp_path):
    """The same by a real program, which is given all replies in turn."""
    for form, chat in CHATS.items():
        cases = [case for case in CASES.values() if case.form == form]
        engine = RepliesEngine(chat, *(case.reply for case in cases))
        path = tmp_path / f"{form}.jsonl"
        script = PROGRAM.format(tools=json.dumps(TOOLS), number=len(cases), path=str(path))
        context = programs_context(
            agent_config(script, max_calls=len(cases)),
            tmp_path / form,
            chat=chat,
            engine=engine,
            changes={"env.max_episode_tokens": 100_000, "model.max_length": 100_000},
        )
        async with context as rollout:
            (episode,) = await play_episodes(rollout)
        assert len(episode.turns) == len(cases), (episode.error, episode.output)
        for line, case in zip(path.read_text().splitlines(), cases, strict=True):
            check_message(json.loads(line), case)


# --- what a reply is ------------------------------------------------------------------------------


def test_a_status_for_each_call():
    reply = marked("add", a=1) + marked("fly") + "<tool_call>x</tool_call>" + marked("stop")[:-9]
    read = PLAIN_READER.read(f"<think>why</think>Well. {reply}", TOOLS)
    assert [call.status for call in read.calls] == [
        *(CallStatus.OK, CallStatus.UNKNOWN_TOOL),
        *(CallStatus.MALFORMED, CallStatus.TRUNCATED),
    ]
    assert [call.name for call in read.made_calls] == ["add", "fly"]
    assert read.thought == "why"
    assert read.text == f"Well. <tool_call>x</tool_call>{marked('stop')[:-9]}"
    assert [call.status for call in PLAIN_READER.read(bare("fly"), TOOLS).calls] == [
        CallStatus.UNKNOWN_TOOL
    ]
    assert [call.name for call in PLAIN_READER.read(bare("fly")).made_calls] == ["fly"]


@pytest.mark.parametrize(
    ("reply", "content"),
    [
        (f"<think>I write <tool_call>.</think>Wait.{marked('stop')}", "Wait."),
        (f"Wait. {bare('stop')}", "Wait."),
        (f"```json\n{bare('stop')}\n```", ""),
        (f"{bare('stop')};{bare('stop')}", ""),
        (f"Before {marked('stop')} after", "Before  after"),
    ],
)
def test_text_around_calls_is_kept(reply, content):
    """Thoughts stay in the content, whatever they name."""
    read = PLAIN_READER.read(reply, TOOLS)
    assert read.content.removeprefix("<think>I write <tool_call>.</think>") == content


def test_a_reply_is_the_text_that_the_model_wrote():
    read = PLAIN_READER.read(marked("add", a=1))
    assert read == marked("add", a=1)
    for copied in (copy.deepcopy(read), pickle.loads(pickle.dumps(read))):
        assert (copied, copied.calls, copied.text) == (read, read.calls, "")


def test_the_format_of_a_model_is_that_of_its_tokens():
    readers = {form: chat.reply_reader for form, chat in CHATS.items()}
    assert {form: reader.form for form, reader in readers.items()} == {
        "plain": HERMES,
        "opened": HERMES,
        "channels": HARMONY,
    }
    assert [form for form, reader in readers.items() if reader.begins_in_thought] == ["opened"]
    message = CHATS["channels"].reply_message(CASES["channels, a recipient"].reply)
    assert message["thinking"] == "why"
    assert message["content"] == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


MARKS_OF_FORMATS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
]
PIECES = [
    *MARKS_OF_FORMATS,
    *("assistant to=functions.add", "analysis", "commentary", "final"),
    *(bare("add", a=1), bare("stop"), '{"', '"}', "{", "}", '"', "\\", "'", "\n", " ", "x"),
]
replies = st.one_of(
    st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
)


@settings(derandomize=True, deadline=None, max_examples=1000)
@given(replies, st.sampled_from([HERMES, HARMONY]), st.booleans())
def test_any_reply_can_be_read(reply, form, begins_in_thought):
    """Trap 21: calls are in order, JSON can hold them, and nothing is read twice."""
    reader = ReplyReader(form, begins_in_thought=begins_in_thought)
    read = reader.read(reply, TOOLS)
    json.dumps([call.arguments for call in read.made_calls], allow_nan=False).encode()
    assert all(bool(call.problem) == call.is_broken for call in read.calls)
    spans = [call.span for call in read.calls]
    places = [place for span in spans for place in span]
    assert places == sorted(places)
    assert places[-1:] <= [len(read.visible)]
    if form is HERMES:
        assert read.visible == reply


@settings(derandomize=True, deadline=None, max_examples=500)
@given(replies.filter(lambda text: "</think>" not in text))
def test_what_ends_inside_a_thought_calls_nothing(draft):
    for reader, begin in (
        (ReplyReader(), "<think>"),
        (ReplyReader(begins_in_thought=True), ""),
    ):
        read = reader.read(begin + draft, TOOLS)
        assert (read.calls, read.objects, read.text, read.is_thinking) == ([], [], "", True)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(PIECES),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.integers(min_value=0, max_value=10_000),
)
def test_whatever_the_arguments_are_a_whole_call_is_read_and_a_cut_one_is_not(value, cut):
    arguments = {"value": value}
    for form in (marked, bare):
        whole = form("say", **arguments)
        for text in (whole, f"<think>{whole}</think>\n{whole}"):
            (call,) = PLAIN_READER.read(text, TOOLS).made_calls
            assert (call.name, call.arguments) == ("say", arguments)
        assert not PLAIN_READER.read(whole[: cut % len(whole)], TOOLS).made_calls


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('<think>{"score": 1}</think>{"score": 0}', {"score": 0}),
        ('<think>{"score": 1}', None),
        ('<think>{"score": 1} is a draft</think> I cannot say', None),
        ("It wrote {x}. " * 200 + '{"score": 0}', {"score": 0}),
        ('{"score": 1} was quoted ' + '{"x ' * 200 + '{"score": 0}', None),
        ('{"why": "<think> was never closed", "score": 0}', {"why": "<think> was never closed"}),
    ],
)
def test_a_judges_verdict_is_not_a_draft_nor_a_quotation(text, verdict):
    if verdict is None:
        with pytest.raises(UnusableAnswerError):
            json_object(text)
    else:
        assert verdict.items() <= json_object(text).items()


# --- linear time ----------------------------------------------------------------------------------

REPEATED = [
    *MARKS_OF_FORMATS,
    *("<|channel|>analysis", "<|channel|>analysis<|message|>", "<|message|>a<|end|>"),
    '<|channel|>commentary to=functions.f<|message|>{"<|end|>',
    *('{"', "{", "}", "{}", "{ ", '"', "\\", '\\"', "[", "[{", "```", "``` ", "&a", "=", "_", "\n"),
    *('{"a":', '{"a"} ', '{"a": [1, ', '{"x\\"<think></think>', '{"\\', '{"a":"', '{"a": tru'),
    *('<tool_call>{"', '<tool_call>{"x\\"', '<tool_call>{"a":', "<tool_call>{} ", "<tool_call>{}{"),
    *('<tool_call>{"a":[1,"', "<think></think>", "</think><think>", "<think>{", '</think>{"'),
    *(bare("stop"), marked("stop"), marked("stop")[:-3], marked("stop")[:-14]),
    *(
        "<tool_call>\\'\"",
        "<tool_call><function=add>",
        "<parameter=a>",
        "</parameter>",
        "</parameter>\n<parameter=a>",
    ),
    *(
        "<tool_call>add",
        "<arg_key>a</arg_key><arg_value>",
        "</arg_value>",
        "<|tool_call>call:add{a:",
    ),
    *(
        '<|"|>',
        "[TOOL_CALLS]",
        "[TOOL_CALLS][{",
        "[add(a='",
        "[add(a=[",
        "add(a=1)\n",
        "<function_calls>",
    ),
    *("invalid header value: '", "invalid header value: \\'\"", "\ue0001\ue001", "\ue0001", "9"),
]
LINEAR = """
import sys
from test_reply_reader import CHATS, REPEATED, readers_of_untrusted_text
for name, number, read in readers_of_untrusted_text():
    for mark in REPEATED:
        for begin in ("", "<tool_call>", '{"a": "'):
            print(name, repr(begin), repr(mark), flush=True)
            read(begin + mark * number)
"""


def readers_of_untrusted_text():
    """Yield everything that takes apart what models write: its name, a length, and a function.

    Those that use the same reader get shorter texts.
    """
    chat = CHATS["channels"]
    request = read_request({"messages": [{"role": "user", "content": "?"}], "tools": TOOLS})
    tool = {"type": "tool", "plain_reply": "final", **TEMPLATES}
    adapters = {
        "tool": build_adapter(ToolAdapterConfig.model_validate(tool)),
        "json": build_adapter(
            JsonAdapterConfig.model_validate({"type": "json", "hidden_fields": [], **TEMPLATES})
        ),
    }

    def hosted(text):
        function = {"name": "f", "arguments": text}
        calls = [{"id": "a", "function": function}]
        endpoint_messages([{"role": "assistant", "content": text, "tool_calls": calls}])

    def unless_unusable(read):
        def reading(text):
            with suppress(UnusableReply, UnusableAnswerError):
                read(text)

        return reading

    yield "program", 2000, lambda text: reply_message(chat.reply_reader.read(text), request, 0)
    yield "opened", 10_000, lambda text: CHATS["opened"].reply_reader.read(text, TOOLS).content
    yield "history", 5_000, chat.reply_message
    yield "hosted", 1000, hosted
    for name, form in FORMATS.items():
        yield name, 500, partial(ReplyReader(form).read, tools=TOOLS)
    for name, adapter in adapters.items():
        yield name, 1000, unless_unusable(adapter.read)
    yield "judge", 20_000, unless_unusable(json_object)
    yield "number", 20_000, unless_unusable(lambda text: number_of(text, 3, "turn"))
    for show in (for_people, for_markdown, code_span, code_block, redact):
        yield show.__name__, 20_000, show


def test_no_reader_takes_quadratic_time():
    """Each takes a moment for a text; one that is quadratic takes many minutes for some."""
    done = subprocess.run(
        [sys.executable, "-c", LINEAR],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout[-200:]


@pytest.mark.parametrize("name", ["add:all", "add/all", "add(all)", 'add"all', "ädd"])
def test_a_recipient_whose_name_only_begins_like_a_tool_is_another_tool(name):
    reply = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}<|call|>"
    (call,) = ReplyReader(HARMONY).read(reply, TOOLS).calls
    assert (call.status, call.name) == (CallStatus.UNKNOWN_TOOL, name)
