"""Adapters `json` and `tool` with real servers: inspected, checked, played and trained on."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from test_train import SMALL, run
from wild_envs import write_island, write_packages, write_python

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.adapters import adapter_for
from openenv_pipe.environments.hosts.process import ProcessHost
from openenv_pipe.environments.tasks import Splits
from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.extras.lab.inspect import inspect_environment
from openenv_pipe.extras.lab.targets import find_target
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import RolloutContext, play_groups
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.types import Status, Task

CHAT = ChatFormat(build_tokenizer())
TINY = (
    *("model.max_length=2048", "model.hidden_size=32", "model.intermediate_size=64"),
    *("env.max_episode_tokens=2048", "env.max_reply_tokens=200", "env.max_turns=3"),
)
RANDOM = "openenv_pipe.environments.random_policy:random_action"
WARM_START = ("trainer.warm_start.steps=1", f"trainer.warm_start.source.policy={RANDOM}")
CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with both packages and the env blocks that `env inspect` writes for them."""
    folder = tmp_path_factory.mktemp("wild")
    write_packages(folder)
    with contextlib.chdir(folder):
        for name in ("market", "vault"):
            target = find_target(f"./envs/{name}", [])
            inspect_environment(target, Path(f"conf/env/{name}.yaml"))
    return folder


@pytest.fixture(scope="module")
def island(tmp_path_factory) -> Path:
    """A folder with the env block that `env inspect` writes for `island`, with its start
    command."""
    folder = tmp_path_factory.mktemp("archipelago")
    package, python = write_island(folder / "elsewhere"), write_python(folder)
    # A random direction raises: without this key, `inspect` takes that for the server's fault.
    legal = "env.step_exception=unusable"
    sark = "+env.variables.ISLAND_NAME=Sark"
    start = [f"env.python={python}", sark, "env.reset_timeout_s=20", legal]
    with contextlib.chdir(folder):
        path = Path("conf/env/island.yaml")
        inspect_environment(find_target(str(package), start), path)
    return folder


async def play(name, replies, *overrides):
    """Play one episode with these replies; return it and its conversation as text."""
    config = compose(["conf=echo", f"env={name}", "host.sessions_per_server=1", *TINY, *overrides])
    env, host_config = config.config.env, config.config.host
    host = ProcessHost(env, host_config, Path("logs"))
    seen = iter(replies)
    task = Task(id="train/1", split="train", index=1, seed=1)
    try:
        await host.start()
        context = RolloutContext(
            env=env,
            loop=LocalRunner(host, await adapter_for(env.adapter, host.urls, host.access)),
            splits=Splits(train=[task], eval=[task]),
            chat=CHAT,
            engine=ScriptedEngine(lambda observations, draw: next(seen)),
            scorer=Scorer(config.config.reward, env.success_reward),
        )
        (group,) = await play_groups(
            context, [task], group_size=1, temperature=1.0, seed=0, label="test"
        )
    finally:
        await host.close()
    (episode,) = group.episodes
    ids = [id for turn in episode.turns for id in (*turn.prompt_ids, *turn.completion_ids)]
    return episode, CHAT.reply_text(ids)


async def test_orders_on_the_market(folder, monkeypatch):
    monkeypatch.chdir(folder)
    replies = [
        '{"side": "hold", "amount": 3}',
        '```json\n{"side": "sell", "amount": 3, "limits": [0.5, 1]}\n```',
        'I sell: {"side": "sell", "amount": 10}',
    ]
    episode, text = await play("market", replies)
    assert (episode.status, episode.error) == (Status.DONE, None)
    assert [len(turn.steps) for turn in episode.turns] == [0, 1, 1]
    assert episode.turns[1].steps[0].action["limits"] == [0.5, 1]
    assert sum(turn.reward for turn in episode.turns) == 1.0
    assert '"side": "buy" | "sell"' in text
    assert '<|user|>{"price":1.5,"wanted":"sell"}<|assistant|>' in text
    assert "side: 'hold' is not one of" in text
    assert '<|user|>{"price":2.5,"wanted":"sell","note":"1.5"}<|assistant|>' in text


async def test_calls_that_open_the_vault(folder, monkeypatch):
    monkeypatch.chdir(folder)
    replies = [
        CALL.format("ad", '{"a": 1}') + CALL.format("add", '{"c": 1}'),
        CALL.format("add", '{"a": 1, "b": 2}') + CALL.format("unlock", '{"code": 0}'),
        CALL.format("unlock", '{"code": 3}') + CALL.format("add", '{"a": 1, "b": 1}'),
    ]
    episode, text = await play("vault", replies)
    assert (episode.status, episode.error) == (Status.DONE, None)
    assert [len(turn.steps) for turn in episode.turns] == [2, 2, 1]
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0]
    assert text.startswith("<|system|>add(a,b)\nunlock(code)\n<|system|>Use the tools")
    assert "The code is 1 + 2." in text
    assert "<|user|>Error: Unknown tool: 'ad'<|user|>Error: 3 validation errors" in text
    assert "<|user|>3<|user|>locked<|assistant|>" in text


def test_check_passes(folder):
    overrides = ("conf=echo", "env=vault", "name=vault", *WARM_START, *TINY, *SMALL)
    code, out, err = run(folder, "check", *overrides, "trainer.warm_start.source.num_episodes=2")
    assert code == 0, out + err
    assert RANDOM in out


def test_a_model_is_trained_on_it_as_inspect_wrote_it(folder):
    """Training needs no code: it has a warm start on random actions and a baseline of them."""
    steps = ("trainer.steps=2", "trainer.tasks_per_step=2", "trainer.group_size=2")
    warm_start = ("trainer.warm_start.steps=1", "trainer.warm_start.source.num_episodes=4")
    fewer = (*steps, *warm_start, "eval.num_tasks=2")
    code, _, err = run(folder, "train", "conf=vault", *fewer)
    assert code == 0, err
    path = folder / "runs" / "vault" / "0001"
    assert json.loads((path / "run.json").read_text())["status"] == "finished"
    assert json.loads((path / "eval" / "baseline_random.json").read_text())["model"] == RANDOM
    for group in read_episodes(episodes_path(path, 0)):
        for turn in group.episodes[0].turns:
            assert turn.unusable is None
            assert not turn.observation.get("error")
    for group in read_episodes(path / "episodes" / "step_000002.jsonl.gz"):
        for episode in group.episodes:
            assert episode.status in (Status.TURN_LIMIT, Status.TOKEN_LIMIT), episode.error
            assert all(turn.unusable for turn in episode.turns)


def test_a_file_that_is_there_is_not_written_over(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"market/tiny\.yaml exists; name another file or model"):
        inspect_environment(find_target("market", []), Path("conf/env/market.yaml"))


def test_the_block_has_all_that_starts_the_server(island):
    text = (island / "conf/env/island.yaml").read_text()
    assert "# A server has one session." in text
    values = yaml.safe_load(text)
    assert values["step_exception"] == "unusable"
    experiment = yaml.safe_load((island / "conf/conf/island.yaml").read_text())
    assert experiment["host"]["sessions_per_server"] == 1 < experiment["host"]["num_servers"]
    assert values["package"] == "./elsewhere/island"
    assert values["python"] == str(island / "python")
    assert values["variables"] == {"ISLAND_NAME": "Sark"}
    assert values["reset_timeout_s"] == 20.0
    assert "step_timeout_s" not in values


async def test_a_walk_on_the_island(island, monkeypatch):
    monkeypatch.chdir(island)
    replies = ["north\n", "east\n", "east\n"]
    episode, text = await play("island", replies)
    assert (episode.status, episode.error) == (Status.DONE, None)
    assert [len(turn.steps) for turn in episode.turns] == [0, 1, 1]
    assert "EXECUTION_ERROR: 'north'" in episode.turns[0].unusable
    assert episode.turns[1].steps[0].action == {"direction": "east"}
    assert "place: Sark\nseen_from: [{'tower': 'other', 'sea': None}]" in text
    failed, _ = await play("island", replies, "env.step_exception=failed")
    assert failed.status is Status.ERROR


def test_a_python_that_is_none_is_explained(island, monkeypatch):
    monkeypatch.chdir(island)
    with pytest.raises(ConfigError, match=r"env\.python='\./nothing' is not a program here"):
        inspect_environment(find_target("island", ["env.python=./nothing"]), None)


def test_an_environment_that_cannot_be_made_shows_its_log(island, monkeypatch):
    monkeypatch.chdir(island)
    sunk = find_target("island", ["env.variables.ISLAND_NAME=Atlantis"])
    with pytest.raises(HostError, match="FACTORY_ERROR") as caught:
        inspect_environment(sunk, None)
    assert "the island has sunk" in str(caught.value)
    assert "log:" not in str(caught.value)  # the log's folder has been removed
