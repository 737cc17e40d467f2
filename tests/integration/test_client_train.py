"""Training on what clients play, with a real server and clients in processes of their own."""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from openai import OpenAI

from openenv_pipe.client import TOKEN_VARIABLE, Client, TrainingEndedError
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.types import Status
from tests.commands import Command, ended_by, run, servers_of, wait_until
from tests.ports import lasting_port

SETTINGS = (
    *("conf=echo", "device=cpu", "num_threads=1", "host.sessions_per_server=8"),
    *("env.max_turns=2", "env.tasks.train.reset.turns=2", "env.tasks.eval.reset.turns=2"),
    *("env.max_reply_tokens=4", "trainer.tasks_per_step=2", "trainer.group_size=2"),
    *("trainer.steps=2", "trainer.checkpoint.every=1"),
)
KEY = "a-key-of-this-test"  # of a served checkpoint
VANISHING = """
import os, signal, sys
from openenv_pipe.client import Client
with Client(sys.argv[1]) as client, client.rollout({"number": 7}) as rollout:
    rollout.chat([{"role": "user", "content": "a"}])
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    """Of the server and its clients."""
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-of-the-tests")


@contextmanager
def serving(folder, *settings, command=("serve", "--train")):
    """Start a training server in a process of its own; yield it and its URL."""
    port = lasting_port()
    options = () if command[0] == "train" else (f"--port={port}",)
    server = Command(folder, *command, *options, *settings)
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def play_all(url):
    """Play until training ends; return the replies of each episode by its task's id."""
    played = []
    with Client(url) as client:
        while True:
            try:
                with client.rollout(timeout_s=240.0) as rollout:
                    played.append((rollout.task["id"], play(rollout)))
            except TrainingEndedError:
                return played


def play(rollout):
    messages, replies, done = list(rollout.task["messages"]), [], False
    while not done:
        reply = rollout.chat(messages)
        replies.append(reply["content"])
        result = rollout.step({"message": reply["content"] or ""})
        done = result.done
        messages += [reply, {"role": "user", "content": result.observation["letter"]}]
    rollout.finish()
    return replies


def episodes_of(folder, step):
    groups = read_episodes(episodes_path(folder, step))
    return [episode for group in groups for episode in group.episodes]


def test_a_client_trains_two_steps(tmp_path, monkeypatch):
    """The trainer computes the logprobs of the sampler; the replies are those that were sent."""
    with serving(tmp_path, *SETTINGS) as (server, url):
        played = play_all(url)
        assert server.wait() == 0, server.err
    folder = tmp_path / "runs" / "echo" / "0001"
    assert RunFolder.open(folder).status == "finished"
    assert f"waiting for clients at {url}" in server.err
    episodes = episodes_of(folder, 1) + episodes_of(folder, 2)
    assert {episode.status for episode in episodes} == {Status.DONE}
    recorded = [(each.task.id, [turn.reply for turn in each.turns]) for each in episodes]
    assert sorted(recorded) == sorted(played)
    records = [each for each in read_metrics(folder / "metrics.jsonl") if each["step"]]
    assert all(record["mismatch/max"] < 1e-4 for record in records)
    assert (folder / "checkpoints" / "step_000002").is_dir()
    assert servers_of(tmp_path) == []
    code, _, said = run(tmp_path, "reproduce", str(folder))
    assert (code, "nobody can play the same again" in said) == (2, True), said
    code, _, said = run(tmp_path, "eval", str(folder))
    assert (code, "clients play no evaluations" in said) == (2, True), said
    monkeypatch.delenv(TOKEN_VARIABLE)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    served(folder, str(folder), "echo/0001@step_000002 ")
    served(folder, f"{folder}@start", "echo/0001@start (no GRPO step yet)")


def served(folder, name, title):
    """Serve a checkpoint, and return what the model answers."""
    port = str(lasting_port())
    serving = Command(folder, "serve", name, "--engine", "local", "--port", port)
    try:
        wait_until(lambda: f"serving {title}" in serving.err, "the server", serving)
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY) as model:
            asked = [{"role": "user", "content": "a"}]
            given = {"model": "echo-0001", "messages": asked, "temperature": 0, "max_tokens": 6}
            return model.chat.completions.create(**given).choices[0].message.content
    finally:
        serving.kill()
        serving.wait()


def vanish(url):
    """Play with a client in a process of its own, which is killed in the midst of an episode."""
    done = subprocess.run([sys.executable, "-c", VANISHING, url], timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL


def report_all(url, played):
    """Play by rules of one's own until training ends; note the task and the reward."""
    with Client(url) as client:
        while True:
            try:
                with client.rollout({"number": 7}, timeout_s=240.0) as rollout:
                    with OpenAI(base_url=rollout.base_url, api_key=rollout.api_key) as model:
                        answer = model.chat.completions.create(
                            model="policy", messages=[{"role": "user", "content": "a number"}]
                        )
                    length = len(answer.choices[0].message.content)
                    reward = length % 5 / 4
                    rollout.finish(reward, {"length": length})
                    played.append((rollout.task["id"], reward))
            except TrainingEndedError:
                return


def test_a_killed_server_goes_on_with_the_same_clients(tmp_path):
    """A client that was killed loses its episode alone; the others wait for the next server."""
    port = lasting_port()
    settings = (
        *("conf=client", "device=cpu", "num_threads=1", f"agent.port={port}"),
        *("trainer.steps=3", "trainer.tasks_per_step=1", "trainer.group_size=4"),
        "trainer.checkpoint.every=1",
    )
    url = f"http://127.0.0.1:{port}"
    folder = tmp_path / "runs" / "client" / "0001"
    server = Command(tmp_path, "train", *settings)
    played = []
    client = threading.Thread(target=report_all, args=(url, played), daemon=True)
    try:
        vanish(url)
        client.start()
        has_saved = (folder / "checkpoints" / "step_000001").is_dir
        ended_by(signal.SIGKILL, server, has_saved, "a checkpoint")
        server = Command(tmp_path, "train", "--resume", str(folder))
        assert server.wait() == 0, server.err
        client.join(timeout=240.0)
        assert not client.is_alive()
    finally:
        server.kill()
        server.wait()
    episodes = [episode for step in (1, 2, 3) for episode in episodes_of(folder, step)]
    assert [each.status for each in episodes[:4]].count(Status.CLIENT_LOST) == 1
    assert {each.status for each in episodes[4:]} == {Status.ANSWERED}
    rewards = [(each.task.id, each.reward) for each in episodes if not each.failed]
    assert all(each in played for each in rewards)
    assert {each.task.split for each in episodes[4:]} == {"client"}
    assert "1 were lost with their clients" in (folder / "report.md").read_text()
    metrics = [each for each in read_metrics(folder / "metrics.jsonl") if each["step"]]
    assert all(each["reported/length"] >= 0 for each in metrics)


def test_ctrl_c_ends_a_server_that_waits_for_clients(tmp_path):
    """Also while episodes are played ahead, which nobody may ever come for."""
    with serving(tmp_path, *SETTINGS, "trainer.max_staleness=1", "trainer.steps=9") as (
        server,
        url,
    ):
        done = threading.Event()

        def play_some():
            with Client(url) as client:
                for _ in range(4):
                    with client.rollout(timeout_s=240.0) as rollout:
                        play(rollout)
            done.set()

        threading.Thread(target=play_some, daemon=True).start()
        folder = tmp_path / "runs" / "echo" / "0001"
        saved = folder / "checkpoints" / "step_000001"
        wait_until(lambda: done.is_set() and saved.is_dir(), "a step", server)
        server.send_signal(signal.SIGINT)
        assert server.wait() == 130, server.err
    assert RunFolder.open(folder).status == "interrupted"
    assert servers_of(tmp_path) == []
