"""`serve` by vLLM, of a model that has learned to call a tool: by clients of OpenAI and Anthropic.

The model is that of examples/agents, which the first test trains with engine=vllm.
"""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from openenv_pipe.models.replies.reader import PLAIN_READER
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.types import Group, TurnRole
from tests.commands import Command, run, wait_until
from tests.integration.test_examples import AGENTS, SMALL
from tests.ports import lasting_port
from tests.vllm_runs import BOUND, LIMIT_S
from tests.vllm_server import installed_vllm

pytestmark = pytest.mark.vllm
EAGER = "--enforce-eager"  # compiling takes longer than these tests
NAME = "two_roles-0001"
SCHEMA = {"type": "object", "properties": {"message": {"type": "string"}}}
ASKED, ASKED_AGAIN = "plan c", "plan e"  # as by the program's planner
KEY = "a-key-of-this-test"
CLIENT = {"api_key": KEY, "max_retries": 0, "timeout": LIMIT_S}
MAX_TOKENS = 120  # a call has 72


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return the folder of a run."""
    if isinstance(found := installed_vllm(), str):
        pytest.skip(found)
    agents = tmp_path_factory.mktemp("serve") / "agents"
    shutil.copytree(AGENTS, agents)
    warm = ("steps=60", "source.num_episodes=256", "episodes_per_step=32")
    shorter = (f"trainer.warm_start.{each}" for each in warm)
    training = Command(
        agents,
        *("train", "conf=two_roles", "engine=vllm", f"engine.arguments=[{EAGER}]"),
        *(*shorter, "trainer.temperature=0.7", *SMALL),
        *("trainer.tasks_per_step=2", "trainer.group_size=4"),
        "trainer.optimizer.lr=5e-4",  # what the warm start has taught is kept
    )
    try:
        assert training.wait(2 * LIMIT_S) == 0, training.err
    finally:
        training.kill()
    return agents / "runs" / "two_roles" / "0001"


@pytest.fixture(scope="module")
def url(trained) -> Iterator[str]:
    port = str(lasting_port())
    given = ("serve", str(trained), "--engine", "vllm", "--port", port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        serving = Command(trained, *given, "--", EAGER)
    try:
        wait_until(lambda: "until Ctrl-C" in serving.err, "the server", serving, LIMIT_S)
        yield f"http://127.0.0.1:{port}"
        serving.send_signal(signal.SIGINT)
        assert serving.wait() in (0, 130), serving.err
    finally:
        serving.kill()


def assert_a_call(name: str, arguments: dict[str, str]) -> None:
    assert name == "say"
    (letter,) = arguments["message"]
    assert letter.islower()


def roles_that_called(groups: list[Group]) -> set[str]:
    """Return the roles of two_roles.py that have called its tool. All turns have to be theirs."""
    turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
    assert {turn.role for turn in turns} == {TurnRole.AGENT}
    tokenizer, called = build_tokenizer(), set()
    for turn in turns:
        if any(call.name == "say" for call in PLAIN_READER.read(turn.reply).made_calls):
            called.add(re.search("plan|write", tokenizer.decode(turn.prompt_ids)).group())
    return called


def test_the_example_trains_on_vllm_by_its_own_yaml(trained):
    """Both roles call the tool, as the warm start has shown them, and both are trained."""
    records = read_metrics(trained / "metrics.jsonl")
    played = [each for each in records if "groups/trained" in each]
    assert [each["step"] for each in played] == [1, 2]
    published = [each for each in played if each["groups/trained"]]
    assert published  # a group whose members all have one reward trains nothing
    assert all(each["mismatch/max"] < BOUND for each in published)
    assert all(
        each["logprob_check/difference"] < BOUND < each["logprob_check/moved"] for each in published
    )
    groups = read_episodes(episodes_path(trained, 1))
    assert roles_that_called(groups) == {"plan", "write"}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(url, stream):
    """A call, its result, and the next call, which the model only writes if it sees the first."""
    tools = [{"type": "function", "function": {"name": "say", "parameters": SCHEMA}}]

    def ask(messages):
        given = {"model": NAME, "messages": messages, "tools": tools}
        given |= {"temperature": 0, "max_tokens": MAX_TOKENS}
        if stream:
            with client.chat.completions.stream(**given) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**given).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert_a_call(call.function.name, json.loads(call.function.arguments))
        function = {"name": call.function.name, "arguments": call.function.arguments}
        called = {"id": call.id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [called]}

    with openai.OpenAI(base_url=f"{url}/v1", **CLIENT) as client:
        assert [model.id for model in client.models.list()] == [NAME]
        asked = {"role": "user", "content": ASKED}
        said = ask([asked])
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"]}
        ask([asked, said, {**result, "content": ASKED_AGAIN}])


@pytest.mark.parametrize("stream", [False, True])
def test_responses(url, stream):
    tools = [{"type": "function", "name": "say", "parameters": SCHEMA, "strict": False}]

    def ask(items):
        given = {"model": NAME, "input": items, "tools": tools}
        given |= {"temperature": 0, "max_output_tokens": MAX_TOKENS}
        if stream:
            with client.responses.stream(**given) as events:
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**given)
        (call,) = answer.output
        assert (call.type, answer.status) == ("function_call", "completed")
        assert_a_call(call.name, json.loads(call.arguments))
        return {
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        }

    with openai.OpenAI(base_url=f"{url}/v1", **CLIENT) as client:
        asked = {"role": "user", "content": ASKED}
        call = ask([asked])
        result = {"type": "function_call_output", "call_id": call["call_id"]}
        ask([asked, call, {**result, "output": ASKED_AGAIN}])


@pytest.mark.parametrize("stream", [False, True])
def test_messages(url, stream):
    tools = [{"name": "say", "description": "Write.", "input_schema": SCHEMA}]

    def ask(messages):
        given = {"model": NAME, "messages": messages, "tools": tools, "max_tokens": MAX_TOKENS}
        given["extra_body"] = {"temperature": 0}  # no argument of the newest clients
        if stream:
            with client.messages.stream(**given) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**given)
        (call,) = answer.content
        assert (call.type, answer.stop_reason) == ("tool_use", "tool_use")
        assert_a_call(call.name, call.input)
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}

    with anthropic.Anthropic(base_url=url, **CLIENT) as client:
        asked = {"role": "user", "content": ASKED}
        call = ask([asked])
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": ASKED_AGAIN}
        said = {"role": "assistant", "content": [call]}
        ask([asked, said, {"role": "user", "content": [result]}])


def test_it_teaches_another_run(url, tmp_path, monkeypatch):
    """On-policy distillation from the server, in a model of its own start."""
    monkeypatch.setenv("TEACHER_API_KEY", KEY)
    kl = (f"reference={url}/v1", "estimator=k2", "importance_weights=false")
    code, _, err = run(
        tmp_path,
        *("train", "conf=echo", "trainer=distillation", "device=cpu", *SMALL),
        *(f"trainer.loss.kl.{each}" for each in kl),
    )
    assert code == 0, err
    first, last = read_metrics(tmp_path / "runs" / "echo" / "0001" / "metrics.jsonl")[-2:]
    assert first["loss/kl"] > 0.0
    assert first["loss/total"] == pytest.approx(first["loss/kl"], rel=1e-6)
    assert last["tokens/trained"] > 0
