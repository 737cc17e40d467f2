"""Training on what clients play, with a real server and clients in processes of their own."""

from contextlib import contextmanager

from openenv_pipe.client import Client, TrainingEndedError
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.types import Status
from tests.commands import Command, run, servers_of
from tests.ports import lasting_port

SETTINGS = (
    *("conf=echo", "device=cpu", "num_threads=1", "host.sessions_per_server=8"),
    *("env.max_turns=2", "env.tasks.train.reset.turns=2", "env.tasks.eval.reset.turns=2"),
    *("env.max_reply_tokens=4", "trainer.tasks_per_step=2", "trainer.group_size=2"),
    *("trainer.steps=2", "trainer.checkpoint.every=1"),
)
VANISHING = """
import os, signal, sys
from openenv_pipe.client import Client
with Client(sys.argv[1]) as client, client.rollout() as rollout:
    rollout.chat([{"role": "user", "content": "a"}])
    os.kill(os.getpid(), signal.SIGKILL)
"""


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


def test_a_client_trains_two_steps(tmp_path):
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
