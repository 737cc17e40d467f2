"""Chat completions for engines that take token ids: from a request's JSON to ids, and back.

The messages are rendered by the model's chat template as a whole, as every server does. Messages
that the model wrote before are recognised, so that their ids are those that were sampled: text that
is encoded again can give other ids.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openenv_pipe.engines.base import Completion
from openenv_pipe.models.chat.messages import in_order_of_calls
from openenv_pipe.models.replies.reply import Reply
from openenv_pipe.types import Finish, Message, Tool

# Settings of a request that would change the distribution that tokens are sampled from.
SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("stop", "min_tokens", "response_format", "tool_choice"),
)
# Their values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
ROLES = ("system", "user", "assistant", "tool")
# A reply's text, and its calls' names and arguments.
MessageKey = tuple[str, tuple[tuple[str, str], ...]]


class InvalidRequestError(Exception):
    """A request that cannot be answered; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """One request for a chat completion, in the terms of chat templates."""

    messages: list[Message]
    sent: list[dict[str, Any]]  # the messages as they were sent
    tools: list[Tool]
    takes_calls: bool  # calls in the reply become `tool_calls`
    max_tokens: int | None
    names_tokens: bool  # the client gets the names of the sampled tokens with their logprobs


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    sent = body.get("messages")
    if not isinstance(sent, list) or not sent or not all(isinstance(m, dict) for m in sent):
        raise InvalidRequestError("messages has to be a list of at least one message")
    tools = [_tool(each) for each in _list_of(body, "tools") if _is_tool(each)]
    given = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    limit = next((each for each in given if each is not None), None)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidRequestError(f"max_tokens is {limit!r:.40}; expected a whole number above 0")
    return ChatRequest(
        messages=_read_messages(sent),
        sent=sent,
        tools=tools,
        takes_calls=bool(tools) and body.get("tool_choice") != "none",
        max_tokens=limit,
        names_tokens=bool(body.get("logprobs")),
    )


def ignored_settings(body: Mapping[str, Any], **used: float) -> dict[str, Any]:
    """Return the settings of a request that sampling ignores.

    A policy is trained on its own distribution at one temperature, and on no other.

    used: the settings that sampling uses.
    """
    wanted = {key: body[key] for key in SETTINGS if body.get(key) is not None}
    neutral = {**NEUTRAL, **{key: (value,) for key, value in used.items()}}
    return {key: value for key, value in wanted.items() if value not in neutral.get(key, ())}


def reply_message(reply: Reply, request: ChatRequest, number: int) -> dict[str, Any]:
    """Return the message of a reply, with its tool calls if the request takes any.

    Broken calls are text, as on other servers.

    number: of the completion; the calls' ids contain it.
    """
    calls = reply.made_calls if request.takes_calls else []
    if not calls:
        return {"role": "assistant", "content": reply.visible}
    return {
        "role": "assistant",
        "content": reply.content or None,
        "tool_calls": [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for index, call in enumerate(calls)
        ],
    }


def completion_body(
    completion: Completion,
    message: Mapping[str, Any],
    *,
    number: int,
    model: str,
    prompt_ids: Sequence[int],
    names_tokens: bool,
) -> dict[str, Any]:
    """Return the JSON of the answer, with vLLM's fields for token ids.

    Equal completions have equal answers: there is no time and no random id in them.
    """
    ended = "tool_calls" if message.get("tool_calls") else "stop"
    finish = "length" if completion.finish is Finish.LENGTH else ended
    ids = completion.token_ids
    content: list[dict[str, Any]] = [{"logprob": logprob} for logprob in completion.logprobs]
    if names_tokens:  # The proxy needs their logprobs alone.
        for entry, token_id in zip(content, ids, strict=True):
            entry |= {"token": f"token_id:{token_id}", "bytes": None, "top_logprobs": []}
    choice = {
        "message": dict(message),
        "finish_reason": finish,
        "logprobs": {"content": content, "refusal": None},
        "token_ids": list(ids),
    }
    # The proxy checks and links each id that it gets. It gets only the last one, because
    # `player.py` links the turns of an episode.
    last_id = {"prompt_token_ids": list(prompt_ids[-1:])}
    return answer_body(number, model, choice, len(prompt_ids), len(ids)) | last_id


def answer_body(
    number: int, model: str, choice: Mapping[str, Any], num_prompt: int, num_reply: int
) -> dict[str, Any]:
    """Return the JSON of an answer of one choice, with the tokens of its prompt and reply."""
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, **choice}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_reply,
            "total_tokens": num_prompt + num_reply,
        },
    }


def _read_messages(sent: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages in the terms of chat templates, with results in the order of calls.

    Calls and results without ids, as Google's may be, belong together by the name of the function.
    """
    names: dict[str, str] = {}  # of called tools, by the id of the call
    open_ids: list[str | None] = []  # of the last message's calls; None: a result has answered it
    messages: list[Message] = []
    results: list[tuple[int | None, Message]] = []
    for message in sent:
        calls = _calls_of(message)
        names |= {str(call.get("id") or name): name for call, (name, _) in calls}
        written = [
            (name, _plain_json(_arguments(call), sort_keys=False)) for call, (name, _) in calls
        ]
        read = _read_message(message, written, names)
        if read["role"] == "tool":
            called = str(message.get("tool_call_id") or message.get("name"))
            place = open_ids.index(called) if called in open_ids else None
            if place is not None:
                open_ids[place] = None
            results.append((place, read))
            continue
        messages += [*in_order_of_calls(results), read]
        results = []
        open_ids = [str(call.get("id") or name) for call, (name, _) in calls]
    return messages + in_order_of_calls(results)


def _read_message(
    message: Mapping[str, Any], calls: Sequence[tuple[str, str]], names: Mapping[str, str]
) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError(f"a message has the role {role!r:.40}; expected a string")
    role = {"developer": "system", "function": "tool"}.get(role, role)
    if role not in ROLES:  # Some templates make a control token of it.
        raise InvalidRequestError(f"a message has the role {role!r:.40}; expected {ROLES}")
    read: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
    if calls:
        read["calls"] = [
            f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
            for name, arguments in calls
        ]
    if role == "tool":
        read["name"] = str(message.get("name") or names.get(str(message.get("tool_call_id")), ""))
    return read


def text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part if isinstance(part, str) else part.get("text") if type(part) is dict else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequestError(f"a message has a part of type {kind!r:.40}; expected text")
        texts.append(text)
    return "\n".join(texts)


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """Return what a reply is recognised by: its text, and its calls' names and arguments."""
    return text_of(message.get("content")).strip(), tuple(call for _, call in _calls_of(message))


def call_ids_of(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ids of a message's tool calls; () if it has no calls, or one has no id."""
    ids = [call.get("id") for call, _ in _calls_of(message)]
    return tuple(map(str, ids)) if all(ids) else ()


def _calls_of(message: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], tuple[str, str]]]:
    """Return a message's tool calls, each with its name and its arguments as plain JSON."""
    found = []
    for call in _list_of(message, "tool_calls"):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError("a tool call in a message has no function with a name")
        found.append((call, (function["name"], _plain_json(_arguments(call), sort_keys=True))))
    return found


def _arguments(call: Mapping[str, Any]) -> Any:
    return call["function"].get("arguments")


def _list_of(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return a field that is a list, or missing. Raises InvalidRequestError."""
    value = fields.get(name) or []
    if not isinstance(value, list):
        raise InvalidRequestError(f"{name} is {value!r:.40}; expected a list")
    return value


def _plain_json(arguments: Any, *, sort_keys: bool) -> str:
    """Return a call's arguments as JSON in one form, whatever form the program has sent."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = arguments
    return json.dumps(value, ensure_ascii=False, sort_keys=sort_keys)


def _tool(tool: Mapping[str, Any]) -> Tool:
    """Return a tool in the one form that all servers give to a template."""
    fields = dict.fromkeys(("name", "description", "parameters"))
    function = {
        key: value for key, value in (fields | tool["function"]).items() if value is not None
    }
    return {"type": "function", "function": function}


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
