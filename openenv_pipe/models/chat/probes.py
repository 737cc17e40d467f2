"""Short conversations by which a chat template shows what it does."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from openenv_pipe.models.chat.messages import calls_in_text
from openenv_pipe.types import Message, Tool

if TYPE_CHECKING:
    from openenv_pipe.models.chat.chat_template import ChatFormat


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(reply: str) -> Message:
    return {"role": "assistant", "content": reply}


OPENING: tuple[Message, ...] = ({"role": "user", "content": "question"},)
REPLY = "answer"
REPLIES = (REPLY, "<think>\nwhy\n</think>\n\nanswer")
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "sky"}}\n</tool_call>'
_LOOK_UP_SKY = {"name": "look_up", "arguments": {"word": "sky"}}
CALL_IN_FIELD: Message = {
    **assistant(""),
    "tool_calls": [{"id": "call00000", "type": "function", "function": _LOOK_UP_SKY}],
}
RESULT: Message = {"role": "tool", "name": "look_up", "content": "the air above"}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What a word means.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}

_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_COUNT: Tool = {
    "type": "function",
    "function": {
        "name": "count",
        "description": 'How many there are: <, >, & and "é".',
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "array"}, "exactly": {"type": "boolean"}},
            "required": ["what"],
        },
    },
}
_NOTHING = {"type": "object", "properties": {}}
_BARE: Tool = {"type": "function", "function": {"name": "stop", "parameters": _NOTHING}}
_ARGUMENTS = {"what": ['é "a"\n', 2, 0.5, None, {"z": True, "b": {}}], "exactly": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateProbe:
    """A conversation as clients send it to a server: calls and tools are in fields of their own."""

    name: str  # in words
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()

    def as_served(self) -> "TemplateProbe":
        """Return it as vLLM gives it to a template: call arguments parsed, missing fields null."""
        fields = dict.fromkeys(("name", "description", "parameters"))
        tools = [{**tool, "function": {**fields, **tool["function"]}} for tool in self.tools]
        messages = [
            {**message, "tool_calls": [_parsed(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in self.messages
        ]
        return replace(self, messages=messages, tools=tools)

    def as_episode(
        self, chat: "ChatFormat"
    ) -> tuple[list[Message], Sequence[Tool], dict[int, Sequence[int] | None]]:
        """Return it as training has it, for `rendered_ids`."""
        messages, names = list[Message](), dict[str, str]()
        replies: dict[int, Sequence[int] | None] = {}
        for index, message in enumerate(self.messages):
            if message["role"] == "assistant":
                calls = message.get("tool_calls", ())
                names |= {each["id"]: each["function"]["name"] for each in calls}
                reply = _reply(message)
                messages.append(chat.reply_message(reply, self.tools, is_sampled=False))
                replies[index] = None
            elif message["role"] == "tool":
                name, text = names[message["tool_call_id"]], message["content"]
                messages.append({"role": "tool", "content": text, "name": name})
            else:
                messages.append(message)
        return messages, self.tools, replies


def probes(chat: "ChatFormat") -> Iterator[TemplateProbe]:
    begin, tools = user("question"), (TOOL, _COUNT, _BARE)
    one = _called(1, "count", _ARGUMENTS)
    two = _called(2, "look_up", {"word": "sky"})
    results = [_result(1, "it is < 3\n"), _result(2, "\u00e9")]
    conversations: Mapping[str, Sequence[Message]] = {
        "one question": [begin],
        "a system prompt": [_SYSTEM, begin],
        "several turns": [begin, assistant("one"), user("more"), assistant("two"), user("and?")],
        "several turns after a system prompt": [_SYSTEM, begin, assistant("one"), user("more")],
        "two messages of the user in a row": [begin, user("more")],
    }
    for name, messages in conversations.items():
        yield TemplateProbe(name=name, messages=messages)
        yield TemplateProbe(name=f"{name} and tools", messages=messages, tools=tools)
    called: Mapping[str, Sequence[Message]] = {
        "a call": [begin, _calling("", one), results[0]],
        "a system prompt and a call": [_SYSTEM, begin, _calling("", two), results[1]],
        "a call after text": [begin, _calling("I count.", one), results[0]],
        "parallel calls": [begin, _calling("", one, two), *results],
        "calls in two turns": [begin, _calling("", one), results[0], _calling("", two), results[1]],
        "an answer after a call": [
            *(begin, _calling("Both.", one, two), *results, assistant("3"), user("more")),
        ],
    }
    for name, messages in called.items():
        yield TemplateProbe(name=name, messages=messages, tools=tools)
    if chat.keeps_text:  # Else clients get replies without thoughts.
        thought = [begin, assistant(REPLIES[1]), user("more")]
        yield TemplateProbe(name="a thought", messages=thought)
        thought = [begin, _calling("<think>\nwhy\n</think>", one), results[0]]
        yield TemplateProbe(name="a thought before a call", messages=thought, tools=tools)


def trained_ids(chat: "ChatFormat", probe: TemplateProbe) -> list[int]:
    """Return the ids of a conversation as an episode of training builds them."""
    messages, tools, replies = probe.as_episode(chat)
    if chat.history == "rerender":
        return chat.rendered_ids(messages, tools, replies)
    ends = [*replies, len(messages)]
    ids = chat.first_ids(messages[: ends[0]], tools)
    for reply, end in itertools.pairwise(ends):
        ids += chat.reply_ids(_reply(probe.messages[reply]))
        ids += chat.following_ids(messages[reply + 1 : end], end=ids[-1])
    return ids


def _reply(message: Message) -> str:
    """Return the reply that a server has sent as a message."""
    functions = [each["function"] for each in message.get("tool_calls", ())]
    calls = [
        f'{{"name": "{each["name"]}", "arguments": {each["arguments"]}}}' for each in functions
    ]
    return calls_in_text({"content": message["content"], "calls": calls})["content"]


def _called(number: int, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def _parsed(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _calling(text: str, *calls: Mapping[str, Any]) -> Message:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": text}
