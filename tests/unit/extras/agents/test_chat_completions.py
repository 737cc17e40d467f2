"""Requests for chat completions whose parts have other types than clients send."""

import pytest

from openenv_pipe.extras.agents.http.chat_completions import InvalidRequestError, read_request

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
