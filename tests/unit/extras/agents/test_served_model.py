"""`serve --engine local`: clients of OpenAI and Anthropic over loopback, with tools and streams."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from fakes import InlineExecutor, tiny_policy
from ports import lasting_port
from programs import RepliesEngine

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.eager import EagerEngine
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.serving import serve
from openenv_pipe.extras.agents.serving.serve import server_key
from openenv_pipe.extras.agents.serving.served_model import ModelEndpoint, ServedModel
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.runs.find import SelectedModel

CHAT = ChatFormat(build_tokenizer())
CALL = 'Wait.<tool_call>{"name": "look_up", "arguments": {"word": "sky"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
ASKED = {"role": "user", "content": "a word"}


class Replies(RepliesEngine):
    """Also keeps the requests."""

    def __init__(self, *replies):
        super().__init__(CHAT, *replies)
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        return await super().generate(request)


@asynccontextmanager
async def served(engine, chat=CHAT, *, key="none", max_tokens=400):
    """Serve a model; yield its URL and the list of what the server tells."""
    told = []
    model = ServedModel(engine, chat, name="echo-0001", max_tokens=max_tokens, notify=told.append)
    port = lasting_port()
    endpoint = ModelEndpoint(model, host="127.0.0.1", port=port, key=key)
    async with endpoint.serving():
        yield f"http://127.0.0.1:{port}", told


@asynccontextmanager
async def openai_client(*arguments, client_key="none", **options):
    async with (
        served(*arguments, **options) as (url, told),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=client_key, max_retries=0) as client,
    ):
        yield client, told


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions_with_tools(stream):
    """A call of a tool, its result, and the answer, by OpenAI's client."""
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
    async with openai_client(Replies(CALL, "blue")) as (client, _):
        assert [model.id async for model in client.models.list()] == ["echo-0001"]

        async def ask(messages):
            request = {"model": "echo-0001", "messages": messages, "tools": tools}
            if not stream:
                answer = await client.chat.completions.create(**request)
                return answer.choices[0].message, answer.choices[0].finish_reason
            async with client.chat.completions.stream(**request) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_completion()
                return answer.choices[0].message, answer.choices[0].finish_reason

        said, finish = await ask([ASKED])
        (call,) = said.tool_calls
        assert (said.content, finish) == ("Wait.", "tool_calls")
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "look_up",
            {"word": "sky"},
        )
        repeated = {"role": "assistant", "content": said.content}
        repeated["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump()}
        ]
        result = {"role": "tool", "tool_call_id": call.id, "content": "it is blue"}
        said, finish = await ask([ASKED, repeated, result])
        assert (said.content, finish) == ("blue", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_tools(stream):
    """The same by OpenAI's Responses."""
    tools = [{"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": False}]
    async with openai_client(Replies(CALL, "blue")) as (client, _):

        async def ask(items):
            request = {"model": "echo-0001", "input": items, "tools": tools}
            if not stream:
                return await client.responses.create(**request)
            async with client.responses.stream(**request) as events:
                async for _ in events:
                    pass
                return await events.get_final_response()

        first = await ask([ASKED])
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("look_up", {"word": "sky"})
        items = [
            ASKED,
            {"type": "function_call", "call_id": call.call_id, "name": call.name}
            | {"arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "it is blue"},
        ]
        assert (await ask(items)).output_text == "blue"


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_with_tools(stream):
    """The same by Anthropic's client."""
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}]
    async with (
        served(Replies(CALL, "blue")) as (url, _),
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):

        async def ask(messages):
            request = {"model": "echo-0001", "max_tokens": 100, "messages": messages}
            if not stream:
                return await client.messages.create(**request, tools=tools)
            async with client.messages.stream(**request, tools=tools) as events:
                return await events.get_final_message()

        said = await ask([ASKED])
        (call,) = [block for block in said.content if block.type == "tool_use"]
        assert (call.name, call.input, said.stop_reason) == ("look_up", {"word": "sky"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "it is blue"}
        content = [
            block.model_dump(include={"type", "text", "id", "name", "input"})
            for block in said.content
        ]
        messages = [
            ASKED,
            {"role": "assistant", "content": content},
            {"role": "user", "content": [result]},
        ]
        said = await ask(messages)
        assert (said.content[0].text, said.stop_reason) == ("blue", "end_turn")


async def test_settings_of_a_request_reach_the_engine_or_are_told():
    engine = Replies("yes")
    async with openai_client(engine) as (client, told):
        create = client.chat.completions.create
        for penalty in 0.5, 0.6:
            await create(
                model="echo-0001",
                messages=[ASKED],
                temperature=0.25,
                top_p=0.9,
                seed=7,
                max_tokens=9,
                presence_penalty=penalty,
            )
        answer = await create(model="echo-0001", messages=[ASKED], logprobs=True)
        assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    assert told == ["a request asks for presence_penalty, which this server ignores"]
    first, _, last = engine.requests
    assert (first.temperature, first.top_p, first.seed, first.max_tokens) == (0.25, 0.9, 7, 9)
    assert (last.temperature, last.top_p) == (1.0, 1.0)
    assert last.max_tokens == 400 - answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": [{"role": "user", "content": "a" * 500}]}, "the messages are 5.. tokens"),
        ({"temperature": 3.0}, "temperature is 3.0"),
        ({"top_p": 0}, "top_p is 0.0; expected more than 0"),
        ({"n": 2}, "n=1"),
    ],
)
async def test_requests_without_an_answer_are_bad_requests(change, message):
    async with openai_client(Replies("yes")) as (client, _):
        with pytest.raises(openai.BadRequestError, match=message):
            await client.chat.completions.create(
                **{"model": "echo-0001", "messages": [ASKED], **change}
            )


async def test_a_model_that_is_not_served_does_not_exist():
    """404 as from vLLM, in each interface; a request without a name is answered."""
    async with served(Replies("yes")) as (url, _), httpx.AsyncClient(base_url=url) as client:
        for path, conversation in (
            ("/v1/chat/completions", {"messages": [ASKED]}),
            ("/v1/responses", {"input": "a word"}),
            ("/v1/messages", {"messages": [ASKED], "max_tokens": 9}),
        ):

            async def post(names, path=path, conversation=conversation):
                headers = {"Authorization": "Bearer none"}
                return await client.post(path, json=conversation | names, headers=headers)

            answer = await post({"model": "gpt-5"})
            assert answer.status_code == 404, path
            text = answer.json()["error"]["message"]
            assert "'gpt-5' does not exist" in text and "'echo-0001'" in text
            assert (await post({"model": "echo-0001"})).status_code == 200, path
        unnamed = await client.post(
            "/v1/chat/completions",
            json={"messages": [ASKED]},
            headers={"Authorization": "Bearer none"},
        )
        assert unnamed.status_code == 200


async def test_a_request_without_messages_names_the_field_that_was_meant():
    async with openai_client(Replies("yes")) as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", body={"message": [ASKED]}, cast_to=object)
    expected = "messages is missing; 'message' is unknown (did you mean messages?)"
    assert caught.value.body["message"] == expected


async def test_the_key_is_asked_for():
    async with openai_client(Replies("yes"), key="secret") as (client, _):
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            await client.models.list()
    async with openai_client(Replies("yes"), key="secret", client_key="secret") as (client, _):
        await client.chat.completions.create(model="echo-0001", messages=[ASKED])


async def test_a_page_under_another_name_is_rejected():
    """A name that somebody lets point to this machine is not one of this server's."""
    async with openai_client(Replies("yes")) as (client, _):
        with pytest.raises(openai.PermissionDeniedError, match="not a name of this machine"):
            await client.models.list(extra_headers={"Host": "rebound.example"})


async def test_equal_requests_with_a_seed_have_equal_answers():
    """With the local engine, alone and among others."""
    policy = tiny_policy(ends=True)
    engine = EagerEngine(policy, max_episodes=4, executor=InlineExecutor())
    async with openai_client(engine, policy.chat, max_tokens=120) as (client, _):

        async def ask(seed):
            answer = await client.chat.completions.create(
                model="echo-0001", messages=[ASKED], seed=seed, max_tokens=12
            )
            return answer.choices[0].message.content

        alone = await ask(3)
        together = await asyncio.gather(*(ask(seed) for seed in range(6)))
    assert together[3] == alone
    assert len(set(together)) > 1


def test_the_proxy_is_imported_without_the_rest_of_openenv():
    """gradio alone takes seconds to import."""
    code = (
        "import sys, openenv_pipe.extras.agents.gateway\n"
        "sys.exit(str([name for name in ('gradio', 'fastmcp', 'torch') if name in sys.modules]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == "[]\n"


def test_serve_has_a_key_always(monkeypatch):
    notes = []
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    assert server_key("0.0.0.0", notes.append) == "a key"
    assert server_key("127.0.0.1", notes.append) == "a key" and notes == []
    monkeypatch.delenv("VLLM_API_KEY")
    made = {server_key("127.0.0.1", notes.append) for _ in range(2)}
    assert len(made) == 2
    assert all(any(key in text for text in notes) for key in made)
    with pytest.raises(ConfigError, match="VLLM_API_KEY is not set"):
        server_key("0.0.0.0", notes.append)


@pytest.mark.parametrize(
    ("own", "is_installed", "expected"),
    [("local", True, "local"), ("vllm", True, "vllm"), ("vllm", False, "local")],
)
def test_the_engine_of_the_run_serves_it(monkeypatch, own, is_installed, expected):
    monkeypatch.setattr(serve, "find_installed", lambda build: object() if is_installed else None)
    notes = []
    config = compose(["conf=smoke", f"engine={own}"]).config
    subject = SelectedModel(folder=None, config=config, checkpoint=None, label="x", step=0)
    assert serve.own_engine(subject, None, notes.append) == expected
    assert len(notes) == (own != expected)
