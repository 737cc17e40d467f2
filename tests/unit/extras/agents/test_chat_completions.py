"""Requests for chat completions whose parts have other types than clients send."""

import pytest

from openenv_pipe.extras.agents.http.chat_completions import read_request

HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("tools", [[], None, [5], [{"type": "function"}]])
def test_a_request_without_a_usable_tool_takes_no_calls(tools):
    request = read_request({"messages": [HELLO], "tools": tools})
    assert request.tools == []
    assert not request.takes_calls
