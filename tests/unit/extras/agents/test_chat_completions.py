"""Requests for chat completions whose parts have other types than clients send."""

import pytest

from openenv_pipe.engines.base import Completion
from openenv_pipe.extras.agents.http.chat_completions import (
    InvalidRequestError,
    completion_body,
    read_request,
)
from openenv_pipe.types import Finish

HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        (5, "tool_calls is 5; expected a list"),
        ([5], "no function with a name"),
        ([{"function": {"arguments": "{}"}}], "no function with a name"),
    ],
)
def test_calls_that_are_none_are_rejected_by_name(calls, why):
    with pytest.raises(InvalidRequestError, match=why):
        read_request({"messages": [{"role": "assistant", "tool_calls": calls}]})


@pytest.mark.parametrize("tools", [[], None, [5], [{"type": "function"}]])
def test_a_request_without_a_usable_tool_takes_no_calls(tools):
    request = read_request({"messages": [HELLO], "tools": tools})
    assert request.tools == []
    assert not request.takes_calls


@pytest.mark.parametrize(
    ("finish", "message", "expected"),
    [
        (Finish.LENGTH, {"content": "a", "tool_calls": [{}]}, "length"),
        (Finish.STOP, {"content": "a", "tool_calls": [{}]}, "tool_calls"),
        (Finish.LENGTH, {"content": "a"}, "length"),
        (Finish.STOP, {"content": "a"}, "stop"),
    ],
)
def test_a_reply_that_was_cut_says_so_whatever_calls_it_has(finish, message, expected):
    completion = Completion(token_ids=[1], logprobs=[-1.0], finish=finish, policy_versions=[0])
    body = completion_body(
        completion, message, number=0, model="m", prompt_ids=[2], names_tokens=False
    )
    assert body["choices"][0]["finish_reason"] == expected
