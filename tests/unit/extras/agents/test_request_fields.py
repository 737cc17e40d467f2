"""No field of a request is dropped in silence: it acts, is harmless, is noted, or is rejected."""

import pytest
from anthropic.types import message_create_params as messages
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from openenv_pipe.extras.agents.http.capture import APIType, UpstreamRequestError
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
