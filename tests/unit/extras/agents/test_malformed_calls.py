"""Calls of the model that are malformed get 400 in the form of their dialect, and never a crash."""

import copy
import itertools
import json

import httpx
import pytest
from clients import training_server
from test_served_model import ASKED, Replies, served

SCHEMA = {"type": "object", "properties": {"w": {"type": "string"}}}
CHAT = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "assistant", "content": None}
        | {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"w": "x"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "user", "content": "go"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "temperature": 1,
    "top_p": 1,
    "max_tokens": 5,
    "stop": ["x"],
    "logprobs": True,
    "n": 1,
    "seed": 3,
    "stream": False,
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
    "logit_bias": {"1": 2},
    "model": "echo-0001",
}
CALLED = {"call_id": "1", "name": "f"}
RESPONSES = {
    "instructions": "be",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", **CALLED, "arguments": "{}", "namespace": "ns"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "text", "text": "r"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
        | {"content": [{"type": "reasoning_text", "text": "t"}], "encrypted_content": "oe:aa"},
        {"type": "local_shell_call", "call_id": "2", "action": {"command": ["ls"]}},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
        {"type": "custom", "name": "c"},
    ],
    "tool_choice": "auto",
    "max_output_tokens": 5,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "stream": False,
}
ANTHROPIC = {
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": []}
        | {
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"w": "x"}},
            ]
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1"}
                | {"content": [{"type": "text", "text": "r"}]}
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "max_tokens": 5,
    "top_k": 1,
    "stop_sequences": ["x"],
    "stream": False,
    "thinking": {"type": "disabled"},
    "metadata": {"user_id": "u"},
}
GOOGLE = {
    "systemInstruction": {"parts": [{"text": "s"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "hi"}]},
        {"role": "model", "parts": [{"text": "t", "thought": True}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"w": "x"}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"r": 1}}}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["f"]}},
    "generationConfig": {"maxOutputTokens": 5, "topK": 1, "stopSequences": ["x"]}
    | {"candidateCount": 1, "thinkingConfig": {"thinkingBudget": 0}},
}
CHAT_PATH, MESSAGES_PATH = "/v1/chat/completions", "/v1/messages"
GOOGLE_PATH = "/v1beta/models/echo-0001:generateContent"
CALLS = {
    CHAT_PATH: CHAT,
    "/v1/responses": RESPONSES,
    MESSAGES_PATH: ANTHROPIC,
    f"{MESSAGES_PATH}/count_tokens": ANTHROPIC,
    GOOGLE_PATH: GOOGLE,
    "/v1beta/models/echo-0001:streamGenerateContent?alt=sse": GOOGLE,
    "/v1beta/models/echo-0001:countTokens": GOOGLE,
}
WRONG = [
    *(None, True, -1, 2**62, 1e308, "", "x", "\ud800", [], [None], [[]], ["x"], {}),
    *({"x": 1}, {"type": 5}, [{"type": "image"}], [{}], [{"type": []}], {"a": {"b": [[[[]]]]}}),
]
NOT_JSON = (
    b"{",
    b"\xff",
    b"[" * 100_000,
    b'{"max_tokens": NaN}',
    b'{"seed": 1' + b"0" * 5000 + b"}",
)
TOOL_CALL = b'{"id": 1, "method": "tools/call", "params": %s}'
NO_OBJECT = (b"[]", b"null", b"1", b'"x"', b"[" * 60 + b"]" * 60)


def paths_in(value, path=()):
    yield path
    items = {}
    if isinstance(value, dict | list):
        items = value if isinstance(value, dict) else dict(enumerate(value))
    for name, inner in items.items():
        yield from paths_in(inner, (*path, name))


def changed(value, path, wrong):
    if not path:
        return wrong
    inner = copy.copy(value)
    inner[path[0]] = changed(value[path[0]], path[1:], wrong)
    return inner


def error_of(path, answer):
    """Return the message of an error in the form of the path's dialect."""
    body = answer.json()
    if "/messages" in path:
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    elif "/models/" in path:
        assert (body["error"]["code"], body["error"]["status"]) == (400, "INVALID_ARGUMENT")
    else:
        assert body["error"]["type"] == "invalid_request_error"
    return body["error"]["message"]


@pytest.fixture
async def http():
    async with (
        served(Replies("yes"), max_tokens=4000) as (url, _),
        httpx.AsyncClient(base_url=url, headers={"x-api-key": "none"}) as client,
    ):
        yield client


@pytest.mark.parametrize("path", CALLS)
async def test_every_field_of_a_wrong_type_is_rejected_or_has_no_effect(http, path):
    """Three wrong values at each place of a whole call, in turn."""
    values = itertools.cycle(WRONG)
    statuses = set()
    assert (await http.post(path, json=CALLS[path])).status_code == 200
    for place in paths_in(CALLS[path]):
        for wrong in itertools.islice(values, 3):
            body = json.dumps(changed(CALLS[path], place, wrong))
            answer = await http.post(path, content=body)
            if place == ("model",) and isinstance(wrong, str) and wrong:
                assert answer.status_code == 404, (wrong, answer.text)
                continue
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400), (place, wrong, answer.text)
            assert answer.status_code == 200 or error_of(path, answer)
    assert statuses == {200, 400}


async def test_what_is_no_json_object_is_rejected(http):
    for path, body in itertools.product(CALLS, (*NOT_JSON, *NO_OBJECT)):
        answer = await http.post(path, content=body)
        expected = "not JSON" if body in NOT_JSON else "expected a JSON object"
        seen = (answer.status_code, expected in error_of(path, answer))
        assert seen == (400, True), (path, body[:40])


async def test_an_error_names_the_field(http):
    for path, body, said in (
        (CHAT_PATH, {"stream": "yes"}, "stream is 'yes'; expected true or false"),
        (CHAT_PATH, {"messages": [], "max_tokens": 1}, "messages has to be a list of at least"),
        (CHAT_PATH, CHAT | {"max_tokens": 0}, "max_tokens is 0; expected a whole number above 0"),
        (CHAT_PATH, CHAT | {"max_tokens": True}, "max_tokens is True; expected a whole number"),
        (CHAT_PATH, {"messages": [5]}, "messages.0 is 5; expected an object"),
        (CHAT_PATH, {"messages": [{"role": 3}]}, "messages.0.role is 3; expected a string"),
        (CHAT_PATH, {"messages": [ASKED | {"content": [{"type": "image_url"}]}]}, "image_url"),
        ("/v1/responses", {"input": [{"type": []}]}, "input.0.type is []; expected a string"),
        ("/v1/responses", {"input": 3}, "input is 3; expected a list"),
        (MESSAGES_PATH, {"system": [{"type": "text"}]}, "system.0.text is None; expected a string"),
        (GOOGLE_PATH, {"contents": [{"parts": 1}]}, "contents.0.parts is 1; expected a list"),
        (GOOGLE_PATH, {"tools": True}, "tools is True; expected a list"),
    ):
        answer = await http.post(path, json=body)
        assert (answer.status_code, said in error_of(path, answer)) == (400, True), answer.text


async def test_malformed_messages_of_mcp_get_errors_of_json_rpc():
    messages = (
        (b"{", 400, -32700),
        (b"[]", 400, -32600),
        (b'{"id": 1, "method": []}', 400, -32600),
        (b'{"id": 1, "method": "none"}', 200, -32601),
        (TOOL_CALL % b"[]", 200, -32602),
        (TOOL_CALL % b'{"name": 1}', 200, -32602),
        (TOOL_CALL % b'{"name": "step", "arguments": [1]}', 200, -32602),
    )
    async with training_server() as server, server.client() as client:
        collecting = server.collect()
        async with client.rollout() as rollout, httpx.AsyncClient() as http:
            for body, status, code in messages:
                answer = await http.post(f"{rollout.env_url}/mcp", content=body)
                found = (answer.status_code, answer.json()["error"]["code"])
                assert found == (status, code), body
        collecting.cancel()
