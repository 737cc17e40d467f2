"""Requests for chat completions whose parts have other types than clients send."""

import pytest

from openenv_pipe.extras.agents.http.chat_completions import InvalidRequestError, read_request

HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": 5}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [HELLO], "tools": 5}, "tools"),
        ({"messages": [HELLO], "tools": {"type": "function"}}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "tool call"),
        ({"messages": [HELLO], "max_tokens": "many"}, "max_tokens"),
    ],
)
def test_a_malformed_request_is_rejected_by_name(body, named):
    with pytest.raises(InvalidRequestError, match=named):
        read_request(body)


@pytest.mark.parametrize("tools", [[], None, [5], [{"type": "function"}]])
def test_a_request_without_a_usable_tool_takes_no_calls(tools):
    request = read_request({"messages": [HELLO], "tools": tools})
    assert request.tools == []
    assert not request.takes_calls
