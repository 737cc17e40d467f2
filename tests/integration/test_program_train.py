"""Training a program that calls the model by HTTP, from the command line."""

import signal
from pathlib import Path

import openai
import pytest

from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.types import Status, TurnRole
from tests.commands import Command, wait_until
from tests.crash_matrix import Result, finish, killed_and_resumed, start, uninterrupted
from tests.ports import lasting_port

# Two sub-agents are asked at once before each letter, in conversations of their own.
PROGRAM = """
import http.client, json, os, threading, urllib.parse

def post(url, body):
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", parts.path, json.dumps(body), headers)
    return json.load(connection.getresponse())

def ask(messages):
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
    return answer["choices"][0]["message"]

messages = json.load(open(os.environ["OPENENV_TASK_FILE"]))["messages"]
while True:
    plans = {}
    def ask_for(role):
        plans[role] = ask([{"role": "system", "content": role}, messages[-1]])["content"][:2]
    threads = [threading.Thread(target=ask_for, args=(role,)) for role in ("plan", "doubt")]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    content = messages[-1]["content"] + plans["plan"] + plans["doubt"]
    messages[-1] = {"role": "user", "content": content}
    reply = ask(messages)
    result = post(os.environ["OPENENV_URL"] + "/step", {"action": {"message": reply["content"]}})
    if result["done"]:
        break
    messages += [reply, {"role": "user", "content": result["observation"]["letter"]}]
print("done")
"""


def arguments(program: Path) -> tuple[str, ...]:
    """Write the program, and return the arguments of a small run with it."""
    program.write_text(PROGRAM)
    return (
        *("conf=echo", "agent=program", f"agent.command=['{{python}}','-S','{program}']"),
        *("device=cpu", "num_threads=1", "env.max_reply_tokens=6", "host.sessions_per_server=4"),
        *("trainer.steps=2", "trainer.tasks_per_step=2", "trainer.group_size=2"),
        "+agent.variables.PYTHONWARNINGS=ignore",
        *("trainer.checkpoint.every=1", "eval.num_tasks=2", "eval.baselines=false"),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return arguments(tmp_path_factory.mktemp("program") / "agent.py")


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("whole"), run, "echo")


def test_a_program_with_three_roles_is_trained_on_its_own_tokens(whole):
    """The trainer computes the logprobs of the sampler on all paths."""
    records = [each for each in read_metrics(whole.folder / "metrics.jsonl") if each["step"]]
    assert all(record["mismatch/max"] < 1e-4 for record in records)
    assert any(record["groups/trained"] for record in records)
    groups = read_episodes(episodes_path(whole.folder, 1))
    for episode in (episode for group in groups for episode in group.episodes):
        assert (episode.status, episode.output) == (Status.DONE, "done\n")
        assert episode.parents == [None, None, None, None, None, 2, None, None, 5, None, None, 8]
        assert {turn.role for turn in episode.turns} == {TurnRole.AGENT}
        assert [len(turn.steps) for turn in episode.turns] == [0, 0, 1] * 4
    assert not list((whole.folder / "logs" / "latest" / "programs").iterdir())


def test_killed_and_resumed_a_program_gives_the_same_bytes(run, whole, tmp_path):
    """`benchmarks/crash.py --program` kills it at more instants."""
    trial = killed_and_resumed(tmp_path, run, "echo", [(0, 0.4), (2, 0.0)])
    assert (len(trial.kills), any(trial.codes)) == (2, False), trial.said
    assert RunFolder.open(trial.folder).status == "finished"
    assert Result.of(trial.folder).difference(Result.of(whole.folder)) is None


def test_its_model_is_served_without_vllm(whole, monkeypatch):
    """By `serve --engine local`, and asked by OpenAI's client."""
    port = str(lasting_port())
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-this-test")
    serving = Command(whole.folder, "serve", str(whole.folder), "--engine", "local", "--port", port)
    try:
        wait_until(lambda: "serving echo/0001@step_" in serving.err, "the server", serving)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="a-key-of-this-test")
        with (
            client,
            client.chat.completions.create(
                model="echo-0001",
                messages=[{"role": "user", "content": "a"}],
                max_tokens=6,
                stream=True,
            ) as stream,
        ):
            chunks = list(stream)
        assert chunks[0].model == "echo-0001"
        assert chunks[0].usage.completion_tokens <= 6
        serving.send_signal(signal.SIGINT)
        assert serving.wait() in (0, 130), serving.err
    finally:
        serving.kill()


def test_a_program_that_is_not_there_is_rejected_before_the_run(tmp_path):
    given = ("conf=echo", "agent=program", "agent.command=[no-such-agent]")
    code, said = finish(start(tmp_path, *given))
    assert (code, list(tmp_path.glob("echo"))) == (2, [])
    assert "agent.command starts with 'no-such-agent'" in said
