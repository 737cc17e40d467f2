"""No field of a request is dropped in silence: it acts, is harmless, is noted, or is rejected."""

import pytest
from anthropic.types import message_create_params as messages
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from openenv_pipe.extras.agents.http.capture import APIType, UpstreamRequestError
from openenv_pipe.extras.agents.http.chat_completions import read_request
from openenv_pipe.extras.agents.http.dialects import Dialects
from openenv_pipe.extras.agents.http.request_fields import (
    ACTS,
    HARMLESS,
    IGNORED,
    REJECTED,
    find_ignored,
)

SENT = {
    APIType.OPENAI_CHAT: chat.CompletionCreateParamsStreaming,
    APIType.OPENAI_RESPONSES: responses.ResponseCreateParamsStreaming,
    APIType.ANTHROPIC: messages.MessageCreateParamsStreaming,
}
FIELDS = [(dialect, name) for dialect, sent in SENT.items() for name in sent.__annotations__]
# Fields that vLLM and others take beside OpenAI's, which programs send as `extra_body`.
EXTRA = [
    (APIType.OPENAI_CHAT, name)
    for name in ("chat_template_kwargs", "guided_json", "structured_outputs", "ignore_eos", "new")
]
GOOGLE = [
    (APIType.GOOGLE, name)
    for name in ("seed", "thinkingConfig", "cachedContent", "responseModalities", "safetySettings")
]


@pytest.mark.parametrize(("dialect", "name"), [*FIELDS, *EXTRA, *GOOGLE])
def test_each_field_of_the_clients_is_accounted_for(dialect, name):
    body = {"generationConfig": {name: "x"}} if dialect is APIType.GOOGLE else {name: "x"}
    if name in REJECTED[dialect]:
        with pytest.raises(ValueError, match=f"{name} is not supported: "):
            find_ignored(dialect, body)
        return
    does_something = name in ACTS[dialect] or name in HARMLESS[dialect]
    assert find_ignored(dialect, body) == ({} if does_something else {name: "x"})


@pytest.mark.parametrize("dialect", SENT)
def test_what_is_said_to_act_is_a_field_of_the_client(dialect):
    """Of other servers are only those that vLLM samples with, and chat completions' old limit."""
    known = set(SENT[dialect].__annotations__)
    others = {"top_k", "min_p", "repetition_penalty", "min_tokens", "max_tokens", "temperature"}
    assert ACTS[dialect] - known <= others | {"top_p"}
    assert set(REJECTED[dialect]) <= known
    assert HARMLESS[dialect] - known <= HARMLESS[APIType.OPENAI_CHAT]


@pytest.mark.parametrize(
    ("dialect", "body", "ignored"),
    [
        (APIType.OPENAI_CHAT, {"seed": 0, "reasoning_effort": "low"}, ["seed", "reasoning_effort"]),
        (APIType.OPENAI_CHAT, {"parallel_tool_calls": True, "top_logprobs": 0}, []),
        (APIType.OPENAI_CHAT, {"parallel_tool_calls": False}, []),
        (APIType.OPENAI_CHAT, {"tools": [{"type": "custom"}, {"type": "function"}]}, ["custom"]),
        (APIType.OPENAI_RESPONSES, {"tools": [{"type": "web_search"}]}, ["web_search"]),
        (APIType.OPENAI_RESPONSES, {"reasoning": {"effort": "low"}}, ["reasoning"]),
        (APIType.ANTHROPIC, {"thinking": {"type": "disabled"}}, []),
        (APIType.ANTHROPIC, {"tools": [{"name": "f"}, {"type": "bash_1"}]}, ["bash_1"]),
        (APIType.GOOGLE, {"generationConfig": {"topK": 3, "seed": 4}}, ["seed"]),
        (APIType.GOOGLE, {"tools": [{"googleSearch": {}}]}, ["googleSearch"]),
    ],
)
def test_fields_without_effect_are_named_with_their_values(dialect, body, ignored):
    found = find_ignored(dialect, body)
    assert [
        each for name, value in found.items() for each in (name, value) if each in ignored
    ] == ignored


@pytest.mark.parametrize("dialect", list(APIType))
def test_the_translated_request_of_each_dialect_lists_them(dialect):
    body = {"messages": [], "input": "a", "contents": [], "new_field": 1}
    request = Dialects().get(dialect).transform_request(body)
    assert request[IGNORED]["new_field"] == 1


def test_what_an_answer_could_not_give_is_rejected():
    with pytest.raises(UpstreamRequestError, match="previous_response_id is not supported: no an"):
        Dialects().get(APIType.OPENAI_RESPONSES).transform_request(
            {"input": "a", "previous_response_id": "resp_1"}
        )


CHAT, RESPONSES = APIType.OPENAI_CHAT, APIType.OPENAI_RESPONSES
ANTHROPIC, GOOGLE_API = APIType.ANTHROPIC, APIType.GOOGLE
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "written"}}
IMAGE = {"type": "image", "source": {"type": "file", "file_id": "f"}}
BLOCK = {"type": "text", "text": "said", "cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
INPUT = {"type": "input_text", "text": "said"}
FILE = {"type": "input_file", "file_data": "x"}
INLINE = {"inlineData": {"mimeType": "text/plain", "data": "eA=="}}


def chat_body(*parts, role="user", **fields):
    return {"messages": [{"role": role, "content": [*parts], **fields}]}


def blocks_of(*blocks, role="user"):
    return {"max_tokens": 1, **chat_body(*blocks, role=role)}


def result(*parts):
    return {"type": "tool_result", "tool_use_id": "1", "content": [*parts]}


def items(*parts, kind="message", field="content"):
    return {"input": [{"type": kind, "role": "user", "call_id": "1", field: [*parts]}]}


def google_parts(*parts, role="user"):
    return {"contents": [{"role": role, "parts": [*parts]}]}


@pytest.mark.parametrize(
    ("dialect", "body", "why"),
    [
        (CHAT, chat_body({"type": "file"}, BLOCK), "messages.0.content.0 is of type 'file', which"),
        (CHAT, chat_body(BLOCK, {"type": "file"}, role="system"), "content.1 is of type 'file'"),
        (CHAT, chat_body(role="assistant", function_call={"name": "f"}), "send it as tool_calls"),
        (CHAT, {"messages": [{"refusal": "No."}]}, "send it as content"),
        (RESPONSES, items(INPUT, FILE), "input.0.content.1 is of type 'input_file'"),
        (RESPONSES, {"input": [{"role": "user", "content": [FILE]}]}, "'input_file'"),
        (RESPONSES, items(FILE, kind="function_call_output", field="output"), "0.output.0 is of"),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "output": {"content": [FILE]}}]},
            "input.0.output.content.0 is of type 'input_file'",
        ),
        (RESPONSES, items(kind="custom_tool_call"), "input.0 is of type 'custom_tool_call'"),
        (RESPONSES, items(kind="custom_tool_call_output"), "'custom_tool_call_output'"),
        (RESPONSES, items(kind="item_reference"), "'item_reference', which the model cannot be"),
        (RESPONSES, {"input": "a", "instructions": [INPUT, FILE]}, "instructions.1 is of type"),
        (ANTHROPIC, blocks_of(PDF, BLOCK), "messages.0.content.0 is of type 'document', which"),
        (ANTHROPIC, blocks_of(IMAGE, BLOCK), "'image'"),
        (ANTHROPIC, blocks_of({"type": "search_result"}), "'search_result'"),
        (ANTHROPIC, blocks_of(result(BLOCK, PDF)), "content.0.content.1 is of type 'document'"),
        (ANTHROPIC, blocks_of(result(), DOCUMENT), "content.1 is of type 'document'"),
        (ANTHROPIC, blocks_of(USE, {"type": "server_tool_use"}, role="assistant"), "'server_tool"),
        (ANTHROPIC, {"system": [BLOCK, PDF], **blocks_of()}, "system.1 is of type 'document'"),
        (GOOGLE_API, google_parts({"text": "a"}, INLINE), "contents.0.parts.1 is of type 'inlineD"),
        (GOOGLE_API, google_parts({"fileData": {}}, role="model"), "'fileData'"),
        (GOOGLE_API, google_parts({"functionResponse": {"parts": [INLINE]}}), "'parts'"),
        (GOOGLE_API, {"systemInstruction": {"parts": [INLINE]}, **google_parts()}, "'inlineData'"),
        (GOOGLE_API, {"contents": ["hi"]}, "contents.0 is 'hi'; expected an object with parts"),
    ],
)
def test_a_part_that_the_model_would_not_be_shown_is_rejected(dialect, body, why):
    with pytest.raises(UpstreamRequestError, match=why):
        Dialects().get(dialect).transform_request(body)


THOUGHT = {"type": "thinking", "thinking": "t", "signature": "s"}
SIGNED = {"text": "said", "thoughtSignature": "s", "inlineData": None}


@pytest.mark.parametrize(
    ("dialect", "body", "shown", "noted"),
    [
        (
            CHAT,
            chat_body(BLOCK, "more", **dict.fromkeys(("refusal", "audio"))),
            ["said", "more"],
            None,
        ),
        (RESPONSES, items(INPUT, "more"), ["said", "more"], None),
        (RESPONSES, items(INPUT, kind="function_call_output", field="output"), ["said"], None),
        (RESPONSES, {"input": [INPUT, {"type": "reasoning", "summary": []}]}, ["said"], None),
        (RESPONSES, {"input": [INPUT, {"type": "mcp_list_tools"}]}, ["said"], "mcp_list_tools"),
        (ANTHROPIC, blocks_of(BLOCK, DOCUMENT), ["said", "written"], None),
        (ANTHROPIC, blocks_of(result(DOCUMENT), BLOCK), ["written", "said"], None),
        (ANTHROPIC, blocks_of(THOUGHT, BLOCK, USE, role="assistant"), ["said"], None),
        (
            ANTHROPIC,
            blocks_of({"type": "redacted_thinking"}, BLOCK, role="assistant"),
            ["said"],
            "redacted_thinking",
        ),
        (GOOGLE_API, google_parts(SIGNED), ["said"], None),
        (GOOGLE_API, google_parts(SIGNED, {"functionCall": {"name": "f"}}, role="model"), [], None),
    ],
)
def test_parts_that_are_read_are_shown_and_those_without_content_noted(dialect, body, shown, noted):
    request = Dialects().get(dialect).transform_request(body)
    text = "\n".join(each["content"] for each in read_request(request).messages)
    assert all(each in text for each in shown)
    assert request[IGNORED].get("parts of type") == noted
