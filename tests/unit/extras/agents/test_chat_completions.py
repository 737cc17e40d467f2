"""Requests for chat completions whose parts have other types than clients send."""

import itertools
import re

import pytest

from openenv_pipe.engines.base import Completion
from openenv_pipe.extras.agents.http.chat_completions import (
    InvalidRequestError,
    completion_body,
    read_request,
)
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import CHAT_TEMPLATE, build_tokenizer
from openenv_pipe.types import Finish

HELLO = {"role": "user", "content": "hello"}
# Reads calls in their field, and shows the ids of calls and results.
WITH_IDS = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content | replace('<tool_call>', '') }}{% if message.role == 'tool' %}"
    "@{{ message.tool_call_id }}{% endif %}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function.arguments | tojson }}@{{ call.id }}{% endfor %}",
)


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


@pytest.fixture(scope="module")
def chat():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = WITH_IDS
    return ChatFormat(tokenizer, history="rerender")


def calls_for(cities, key):
    """Return calls that differ in their ids, or have none and differ in their names."""
    return [
        {
            **({"id": city} if key == "id" else {}),
            "function": {"name": city if key == "name" else "weather", "arguments": f'"{city}"'},
        }
        for city in cities
    ]


@pytest.mark.parametrize("key", ["id", "name"])
@pytest.mark.parametrize(
    "answered",
    [
        *itertools.permutations(("Paris", "Oslo")),
        *itertools.permutations(("Paris", "Oslo", "Rome")),
        ("Rome", "Oslo"),  # and the first call has no result
    ],
)
def test_a_result_stands_beside_the_call_that_it_answers(chat, answered, key):
    cities = ("Paris", "Oslo", "Rome")[: 3 if "Rome" in answered else 2]
    messages = [HELLO, {"role": "assistant", "tool_calls": calls_for(cities, key)}]
    messages += [{"role": "tool", "tool_call_id": city, "content": city} for city in answered]
    read = read_request({"messages": messages}).messages
    prompt = chat.tokenizer.decode(chat.rendered_ids(chat.without_markup(read)))
    ids = dict(re.findall(r'"(\w+)"@(\w+)', prompt))
    assert list(ids) == list(cities)
    shown = re.findall(r"<\|user\|>(\w+)@(\w+)", prompt)
    assert shown == [(city, ids[city]) for city in cities if city in answered]


def test_results_stay_in_their_order_where_it_is_not_known_which_call_they_answer():
    results = [{"role": "tool", "content": text} for text in ("1", "2")]
    messages = [HELLO, {"role": "assistant", "tool_calls": calls_for("ab", "id")}, *results]
    assert [each["content"] for each in read_request({"messages": messages}).messages[2:]] == [
        *("1", "2")
    ]
