"""Engine `openai` against a local server that answers, rejects and stalls on demand."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from stub_server import answering

from openenv_pipe.config.schema import OpenAIEngineConfig
from openenv_pipe.engines.base import MessageRequest, TextReply
from openenv_pipe.engines.openai import OpenAIEngine
from openenv_pipe.engines.openai.client import ChatClient, RateLimit
from openenv_pipe.engines.openai.messages import endpoint_messages
from openenv_pipe.errors import ConfigError, EngineError
from openenv_pipe.models.replies.reader import PLAIN_READER
from openenv_pipe.types import Finish

Answer = tuple[int, Any, dict[str, str]]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


def said(content: str | None, finish: str = "stop", **message: Any) -> Answer:
    choice = {"message": {"role": "assistant", "content": content, **message}}
    return 200, {"choices": [{**choice, "finish_reason": finish}]}, {}


class Endpoint:
    """Gives the answers in order and then repeats the last one; records all requests."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        status, body, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return web.Response(status=status, body=content, headers=headers)


@contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Records the waits between retries in seconds, without waiting."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("openenv_pipe.engines.openai.client.asyncio.sleep", noted)
    yield waits
    monkeypatch.undo()


def run(endpoint: Endpoint, story: Callable[..., Any], **changes: Any) -> Any:
    async def main() -> Any:
        async with answering(endpoint.answer, "/v1/chat/completions") as url:
            config = OpenAIEngineConfig(
                **{
                    "type": "openai",
                    "base_url": f"{url}/v1",
                    "model": "big",
                    "api_key": "a-secret-key",
                    "max_concurrent": 4,
                    "requests_per_minute": None,
                    "tokens_per_minute": None,
                    "max_tokens_key": "max_tokens",
                    "parameters": {},
                    "images": False,
                    "timeout_s": 60.0,
                    "max_retries": 2,
                    "cache_dir": None,
                    **changes,
                }
            )
            async with ChatClient(config, cache_dir=config.cache_dir) as client:
                return await story(OpenAIEngine(config, client))

    return asyncio.run(main())


async def hello(engine: OpenAIEngine) -> str:
    return (await engine.generate(request(user("hello")))).text


def replies_of(endpoint: Endpoint, *turns: int, **changes: Any) -> list[TextReply]:
    """Return the replies to the same question at these turns."""

    async def story(engine: OpenAIEngine) -> list[TextReply]:
        return [await engine.generate(request(user("hello"), turn=turn)) for turn in turns]

    return run(endpoint, story, **changes)


def request(*messages: dict[str, str], turn: int = 0, **changes: Any) -> MessageRequest:
    return MessageRequest(
        **{
            "episode": 0,
            "turn": turn,
            "messages": messages,
            "max_tokens": 64,
            "temperature": 0.5,
            "seed": 7,
            **changes,
        }
    )


def after(reply: TextReply, *messages: dict[str, str], **changes: Any) -> MessageRequest:
    """Return the request of a second turn, to which an environment answered with messages."""
    return request(user("look"), reply.assistant_message, *messages, turn=1, **changes)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


AIR = {"role": "tool", "name": "look", "content": "air"}


def answered(endpoint: Endpoint, *messages: dict[str, str], tools: Any = (TOOL,)) -> TextReply:
    """Return the first reply, after a second turn that these messages have begun."""

    async def story(engine: OpenAIEngine) -> TextReply:
        first = await engine.generate(request(user("look"), tools=[*tools]))
        await engine.generate(after(first, *messages, tools=[*tools]))
        return first

    return run(endpoint, story)


def test_a_conversation_is_told_as_a_whole_each_time() -> None:
    endpoint = Endpoint(said("cräne"), said("sheet", "length"))

    async def story(engine: OpenAIEngine) -> None:
        first = await engine.generate(request(user("look")))
        assert (first.text, first.finish) == ("cräne", Finish.STOP)
        second = await engine.generate(after(first, user("again \ud800")))
        assert second.finish is Finish.LENGTH

    run(endpoint, story)
    assert endpoint.headers[0]["Authorization"] == "Bearer a-secret-key"
    asked = endpoint.bodies[1]
    assert [message["content"] for message in asked["messages"]] == ["look", "cräne", "again ?"]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("big", 0.5, 64)
    assert endpoint.bodies[0]["seed"] != asked["seed"]
    assert "tools" not in asked


def test_a_reply_that_a_filter_withholds_is_told_from_an_empty_one(tmp_path: Any) -> None:
    endpoint = Endpoint(said(None, "content_filter"), said(None))
    filtered = ("", Finish.FILTERED)
    replies = replies_of(endpoint, 0, 0, 1, cache_dir=str(tmp_path))  # the second is cached
    found = [(reply.text, reply.finish) for reply in replies]
    assert found == [filtered, filtered, ("", Finish.STOP)]


IMPOSSIBLE = [{"prompt_tokens": 10**400}, {"prompt_tokens": True}, {"prompt_tokens": -1}, [1]]


def test_tokens_are_those_that_the_endpoint_reports_if_they_can_be() -> None:
    status, answer, headers = said("fine")
    usages = [{"prompt_tokens": 12, "completion_tokens": 3}, {"prompt_tokens": 0}, None, "many"]
    usages += IMPOSSIBLE
    endpoint = Endpoint(*((status, {**answer, "usage": usage}, headers) for usage in usages))
    replies = replies_of(endpoint, *range(8))
    found = [(reply.num_prompt_tokens, reply.num_completion_tokens) for reply in replies]
    assert found == [(12, 3)] + [(None, None)] * 7


def test_seeds_are_those_that_answers_are_kept_under_and_fit_any_endpoint() -> None:
    endpoint = Endpoint(said("fine"))
    replies_of(endpoint, *range(20))
    seeds = [body["seed"] for body in endpoint.bodies]
    assert seeds[3] == 849297907
    assert len(set(seeds)) == 20 and max(seeds) < 2**31


def test_calls_of_tools_are_read_as_the_adapter_reads_them_and_answered_by_id() -> None:
    endpoint = Endpoint(said(None, "tool_calls", tool_calls=[CALL]), said("blue"))
    (made,) = PLAIN_READER.read(answered(endpoint, AIR).text).made_calls
    assert (made.name, made.arguments) == ("look", {"at": "sky"})
    assert endpoint.bodies[0]["tools"] == endpoint.bodies[1]["tools"] == [TOOL]
    *_, reply, answer = endpoint.bodies[1]["messages"]
    assert reply["tool_calls"] == [CALL]
    assert answer == {"role": "tool", "tool_call_id": "c1", "content": "air"}


def test_a_result_answers_the_call_that_was_made_not_a_broken_one_before_it() -> None:
    broken = {**CALL, "id": "c0", "function": {"name": "look", "arguments": '{"at": '}}
    endpoint = Endpoint(said(None, tool_calls=[broken, CALL]), said("blue"))
    first = answered(endpoint, AIR)
    assert [call.is_made for call in PLAIN_READER.read(first.text).calls] == [False, True]
    answers = {
        message["tool_call_id"]: message["content"]
        for message in endpoint.bodies[1]["messages"]
        if message["role"] == "tool"
    }
    assert answers == {"c1": "air", "c0": "This call was not made."}


def test_a_result_that_names_its_call_answers_no_earlier_one() -> None:
    reply = {"role": "assistant", "content": None}
    reply |= {"tool_calls": [{**CALL, "id": call_id} for call_id in ("c0", "c1")]}
    _, *answers = endpoint_messages([reply, {**AIR, "call": 1}])
    assert [(each["tool_call_id"], each["content"]) for each in answers] == [
        ("c1", "air"),
        ("c0", "This call was not made."),
    ]


def test_a_call_that_was_not_made_is_answered_all_the_same() -> None:
    endpoint = Endpoint(said(None, tool_calls=[CALL]), said("sorry"))
    answered(endpoint, user("that was no call"))
    roles = [message["role"] for message in endpoint.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "tool", "user"]


def test_a_result_without_a_call_is_a_user_message() -> None:
    endpoint = Endpoint(said("a call in words"), said("done"))
    answered(endpoint, AIR, tools=())
    assert endpoint.bodies[1]["messages"][-1] == user("air")


def test_what_passes_is_tried_again_and_a_wait_that_is_asked_for_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = (429, {"error": "slow down"}, {"Retry-After": "3"})
    endpoint = Endpoint(busy, (500, {}, {}), said("late"))
    with no_waiting(monkeypatch) as waits:
        assert run(endpoint, hello) == "late"
    assert waits[0] == 3.0
    assert 0 < waits[1] <= 1.0


def test_after_the_last_try_the_error_says_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint((503, {"error": "overloaded"}, {}))
    with no_waiting(monkeypatch), pytest.raises(EngineError, match=r"in 3 tries.*503.*overloaded"):
        run(endpoint, hello)
    assert len(endpoint.bodies) == 3


def completion(message: Any, **choice: Any) -> Any:
    return {"choices": [{"message": message, **choice}]}


UNUSABLE = {
    "half a JSON": (b'{"choices": [{"mess', "not JSON"),
    "a deep JSON": (b"[" * 100_000, "not JSON"),
    "no object": ([1], "no chat completion, at the answer"),
    "an error": ({"error": {"message": "overloaded"}}, "status 200 with an error.*overloaded"),
    "a reason that is not text": (completion({"refusal": {"a": 1}}), "should be a valid string"),
    "an error beside a choice": ({**completion({"content": "x"}), "error": "no"}, "status 200"),
    "no choices": ({}, "at choices"),
    "choices of none": ({"choices": []}, "at choices"),
    "choices by name": ({"choices": {"0": {}}}, "at choices"),
    "a null choice": ({"choices": [None]}, r"at choices\.0"),
    "no message": ({"choices": [{"text": "x"}]}, r"at choices\.0\.message"),
    "parts for a text": (completion({"content": [{"text": "x"}]}), r"message\.content"),
    "a number for a text": (completion({"content": 5}), r"message\.content"),
    "a call without id": (
        completion({"tool_calls": [{**CALL, "id": None}]}),
        r"tool_calls\.0\.id",
    ),
    "a call without function": (completion({"tool_calls": [{"id": "c1"}]}), r"\.function"),
    "arguments as an object": (
        completion({"tool_calls": [{**CALL, "function": {"name": "look", "arguments": {}}}]}),
        r"function\.arguments",
    ),
    "calls that are none": (completion({"tool_calls": "look"}), r"message\.tool_calls"),
    "an interrupted reply": (completion({"content": "x"}, finish_reason="error"), "reason error"),
    "an aborted reply": (completion({"content": "x"}, finish_reason="abort"), "reason abort"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_answer_of_another_form_is_asked_again_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    body, message = UNUSABLE[name]
    with no_waiting(monkeypatch):
        assert run(Endpoint((200, body, {}), said("late")), hello) == "late"
    with no_waiting(monkeypatch), pytest.raises(EngineError, match=f"in 3 tries.*{message}"):
        run(Endpoint((200, body, {})), hello)


def test_a_cached_answer_that_was_damaged_is_asked_for_again(tmp_path: Any) -> None:
    # The address is a part of the cache's key, and has to stay the same.
    async def twice(engine: OpenAIEngine) -> list[str]:
        first = await hello(engine)
        (path,) = tmp_path.rglob("*.json")
        path.write_text('{"choices": [null]}')
        engine.begin_rollouts(1, 1)
        return [first, await hello(engine)]

    endpoint = Endpoint(said("one"), said("two"))
    assert run(endpoint, twice, cache_dir=str(tmp_path)) == ["one", "two"]


@pytest.mark.parametrize(
    ("status", "key"), [(401, "api_key"), (404, "base_url"), (302, "base_url"), (400, "parameters")]
)
def test_what_never_will_do_is_rejected_at_once(status: int, key: str) -> None:
    endpoint = Endpoint((status, {"error": "no"}, {"Location": "http://127.0.0.1:1/elsewhere"}))
    with pytest.raises(ConfigError, match=f"engine.{key}") as caught:
        run(endpoint, hello)
    assert len(endpoint.bodies) == 1
    assert "a-secret-key" not in str(caught.value)


def test_the_same_request_is_asked_once_and_another_seed_is_another(tmp_path: Any) -> None:
    endpoint = Endpoint(said("one"), said("two"))

    async def story(engine: OpenAIEngine) -> list[str]:
        replies = []
        for episode, seed in enumerate([7, 7, 8]):
            reply = await engine.generate(request(user("hello"), episode=episode, seed=seed))
            replies.append(reply.text)
        return replies

    assert run(endpoint, story, cache_dir=str(tmp_path / "cache")) == ["one", "one", "two"]
    assert len(endpoint.bodies) == 2
    kept = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert len(kept) == 2 and "a-secret-key" not in "".join(kept)


def test_parameters_stand_over_ours_and_null_leaves_one_out() -> None:
    endpoint = Endpoint(said("fine"))
    changes = {"temperature": None, "reasoning_effort": "low"}
    run(endpoint, hello, parameters=changes, api_key=None)
    assert "temperature" not in endpoint.bodies[0]
    assert endpoint.bodies[0]["reasoning_effort"] == "low"
    assert "Authorization" not in endpoint.headers[0]


async def test_a_rate_limit_lets_a_minutes_worth_pass_and_then_spreads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def noted(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("openenv_pipe.engines.openai.client.time.monotonic", lambda: 100.0)
    monkeypatch.setattr("openenv_pipe.engines.openai.client.asyncio.sleep", noted)
    limit = RateLimit(120)
    for _ in range(122):
        await limit.take(1)
    assert waits == [0.5, 1.0]
