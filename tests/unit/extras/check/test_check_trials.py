"""What `check` measures and tries of an environment: tokens, sessions, baselines, resets."""

import asyncio
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from fakes import SPLITS, FakeHost, run_config

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.tasks import RangeTasks, Splits
from openenv_pipe.errors import ConfigError, StepRejectedError
from openenv_pipe.extras.check import environment
from openenv_pipe.extras.check.environment import load_chat, tokens_line
from openenv_pipe.extras.check.rewards import TriedEnvironment, try_baselines
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.types import Episode, Opening

CHAT = ChatFormat(build_tokenizer())  # a token is a byte
TOOL = {"type": "function", "function": {"name": "t" * 200, "parameters": {}}}


def opening(length: int, tools: Sequence[Mapping[str, Any]] = ()) -> Opening:
    return Opening(messages=[{"role": "user", "content": "x" * length}], tools=tools)


def tokens(lengths: Sequence[int], **keys: Any) -> Line:
    env = run_config({f"env.{key}": value for key, value in keys.items()}).env
    return tokens_line(env, CHAT, [opening(length) for length in lengths])


def test_first_messages_are_measured_against_the_tokens_of_an_episode():
    fits = tokens([40, 60], max_episode_tokens=120, max_reply_tokens=12)
    assert fits.result is Result.OK
    assert fits.measured["longest"] - fits.measured["shortest"] == 20
    tight = tokens([40, 110], max_episode_tokens=120, max_reply_tokens=12)
    assert tight.result is Result.WARN
    assert "env.max_reply_tokens=12" in tight.text
    full = tokens([200, 300], max_episode_tokens=120)
    assert full.result is Result.FAIL
    assert "env.max_episode_tokens=120 leaves no room" in full.text
    cut = tokens([3000], max_episode_tokens=120, max_observation_tokens=20)
    assert cut.result is Result.OK


def test_tools_that_fill_an_episode_are_named():
    line = tokens_line(run_config().env, CHAT, [opening(20, [TOOL])])
    assert line.result is Result.FAIL
    assert "describe 1 tools" in line.text


def test_few_sessions_for_a_step_are_a_warning():
    config = run_config({"trainer.tasks_per_step": 4, "trainer.group_size": 8})
    assert environment._sessions_line(config, 8).result is Result.OK
    line = environment._sessions_line(config, 1)
    assert line.result is Result.WARN
    assert "1 at a time" in line.text
    assert "more servers" in line.text


@pytest.fixture
def players(monkeypatch: pytest.MonkeyPatch) -> str:
    """Scripted policies in a module, named by its import path."""
    module = ModuleType("players_of_this_test")
    module.speaks = lambda observations, draw: "hello"
    module.raises = lambda observations, draw: observations[0]["no such field"]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def tried(config: RunConfig, host: FakeHost) -> Line:
    async def lines() -> list[Line]:
        splits = Splits(**{each: RangeTasks(each, config.env.tasks.train) for each in SPLITS})
        adapter = build_adapter(config.env.adapter)
        played = TriedEnvironment(
            config=config, host=host, adapter=adapter, splits=splits, chat=CHAT
        )
        return [line async for line in try_baselines(played)]

    (line,) = asyncio.run(lines())
    return line


def test_a_baseline_plays_one_episode(players: str):
    config = run_config({"env.baselines": {"one": f"{players}:speaks"}})
    line = tried(config, FakeHost())
    assert (line.name, line.result) == ("baseline one", Result.OK)
    assert "turns" in line.text


def test_baselines_that_cannot_be_played_are_warnings_as_train_goes_on(players: str):
    def raising(seed: int, number: int, action: Mapping[str, Any]) -> StepResult:
        if number:
            raise StepRejectedError("EXECUTION_ERROR", "no such move")
        return StepResult({"text": "go"}, 0.0, done=False)

    line = tried(run_config({"env.baselines": {"one": f"{players}:speaks"}}), FakeHost(raising))
    assert line.result is Result.WARN
    assert "no such move" in line.text
    assert "env.step_exception=unusable" in line.text

    line = tried(run_config({"env.baselines": {"one": f"{players}:raises"}}), FakeHost())
    assert line.result is Result.WARN
    assert "no such field" in line.text


def test_a_baseline_that_takes_long_is_stopped(players: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("openenv_pipe.extras.check.rewards.LIMIT_S", 0.05)

    class SlowHost(FakeHost):
        async def delay(self) -> None:
            await asyncio.sleep(3600)

    line = tried(run_config({"env.baselines": {"one": f"{players}:speaks"}}), SlowHost())
    assert line.result is Result.WARN
    assert "takes more than 0.05 s" in line.text


def test_baselines_that_are_not_evaluated_are_not_tried(players: str):
    config = run_config({"env.baselines": {"one": f"{players}:raises"}, "eval.baselines": False})
    with pytest.raises(ValueError, match="not enough values"):
        tried(config, FakeHost())


def check_played(config: RunConfig, host: FakeHost, monkeypatch: Any) -> dict[str, Line]:
    async def adapter_for(*_: Any) -> Any:
        return build_adapter(config.env.adapter)

    host.urls, host.access = ["http://fake"], None
    monkeypatch.setattr(environment, "build_host", lambda *_: host)
    monkeypatch.setattr(environment, "adapter_for", adapter_for)
    return {line.name: line for line in environment.check_environment(config)}


def test_resets_that_are_done_at_once_are_rejected_with_the_observation(
    monkeypatch: pytest.MonkeyPatch,
):
    def done(seed: int, number: int, action: Mapping[str, Any]) -> StepResult:
        return StepResult({"error": "the key of the service is missing"}, None, done=True)

    with pytest.raises(ConfigError, match="the key of the service is missing"):
        check_played(run_config(), FakeHost(done), monkeypatch)


def test_baselines_play_on_where_tasks_begin_alike(players: str, monkeypatch: pytest.MonkeyPatch):
    def told_after_an_action(seed: int, number: int, action: Mapping[str, Any]) -> StepResult:
        return StepResult({"text": str(seed) if number else "go"}, 0.0, done=number > 0)

    def alike(seed: int, number: int, action: Mapping[str, Any]) -> StepResult:
        return StepResult({"text": "go"}, 0.0, done=number > 0)

    def line(play: Any, *names: str) -> Line:
        baselines = {name: f"{players}:{name}" for name in names}
        config = run_config({"env.baselines": baselines})
        return check_played(config, FakeHost(play), monkeypatch)["tasks"]

    told = line(told_after_an_action, "raises", "speaks")
    assert (told.result, "the first and the last differ" in told.text) == (Result.OK, True)
    assert line(alike, "speaks").result is Result.WARN
    for unplayed in (line(alike), line(alike, "raises")):
        assert unplayed.result is Result.OK
        assert "could not be told whether they differ" in unplayed.text


@pytest.fixture
def reward_functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Reward functions in a module, named by its import path."""

    def raises_at_an_action(episode: Episode) -> float:
        if any(turn.reply == "hello" for turn in episode.turns):
            raise KeyError("no such field")
        return 0.5

    def blocks(episode: Episode) -> float:
        released.wait()
        return 0.0

    released = threading.Event()
    module = ModuleType("rewards_of_this_test")
    module.number_of_turns = lambda episode: len(episode.turns)
    module.text = lambda episode: "0.5"
    module.nothing = lambda episode: None
    module.shortness = lambda episode: sum(
        max(turn.logprobs) + 1 / len(turn.completion_ids) / len(turn.prompt_ids)
        for turn in episode.turns
    )
    module.raises_at_an_action, module.blocks = raises_at_an_action, blocks
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module.__name__
    released.set()


def scored(function: str, monkeypatch: pytest.MonkeyPatch, **baselines: str) -> Line:
    term = {"type": "python", "weight": 1.0, "per_turn": False, "target": function}
    terms = {"mine": {**term, "keywords": {}, "use": "sum"}}
    config = run_config({"reward.terms": terms, "env.baselines": baselines})
    return check_played(config, FakeHost(), monkeypatch)["reward mine"]


def test_reward_functions_are_called_with_an_episode_of_each_policy(
    players: str, reward_functions: str, monkeypatch: pytest.MonkeyPatch
):
    one = f"{players}:speaks"
    line = scored(f"{reward_functions}:number_of_turns", monkeypatch, one=one)
    assert line.result is Result.OK
    assert line.text.endswith(
        "returns 3 for an episode of random actions, 3 for an episode of replies that are not "
        "actions, 3 for an episode of one"
    )

    line = scored(f"{reward_functions}:text", monkeypatch)
    assert (line.result, "return one number" in line.text) == (Result.FAIL, True)

    unread = scored(f"{reward_functions}:raises_at_an_action", monkeypatch)
    assert (unread.result, "returns 0.5" in unread.text) == (Result.OK, True)
    line = scored(f"{reward_functions}:raises_at_an_action", monkeypatch, one=one)
    assert (line.result, "raised KeyError: 'no such field'" in line.text) == (Result.FAIL, True)

    line = scored(f"{reward_functions}:shortness", monkeypatch, one=one)
    assert line.result is Result.OK, "episodes have token ids and logprobs, as in training"

    line = scored(f"{reward_functions}:nothing", monkeypatch)
    assert "returns None for an episode of random actions, None for" in line.text
    assert "; an episode without a value has no reward" in line.text
    assert line.result is Result.WARN


def test_a_reward_function_meets_replies_that_are_no_actions(
    reward_functions: str, monkeypatch: pytest.MonkeyPatch
):
    """Most of an untrained model's are, and a function may raise at nothing else."""
    monkeypatch.setattr(
        sys.modules[reward_functions],
        "number_of_turns",
        lambda episode: len(episode.turns[-1].steps[0].observation),
    )
    term = {"type": "python", "weight": 1.0, "per_turn": False, "keywords": {}, "use": "sum"}
    config = run_config(
        {
            "reward.terms": {"mine": {**term, "target": f"{reward_functions}:number_of_turns"}},
            "env.adapter.pattern": "(?P<text>hello)",
        }
    )
    line = check_played(config, FakeHost(), monkeypatch)["reward mine"]
    assert (line.result, "raised IndexError" in line.text) == (Result.FAIL, True)


def test_a_number_that_no_observation_has_is_named(monkeypatch: pytest.MonkeyPatch):
    config = run_config({"env.metrics": {"left": "numbr", "right": "number"}})

    def play(seed: int, number: int, action: Mapping[str, Any]) -> StepResult:
        return StepResult({"text": "a", "number": 3}, None, done=number > 0)

    lines = check_played(config, FakeHost(play), monkeypatch)
    assert "metric env/right" not in lines
    line = lines["metric env/left"]
    assert line.result is Result.WARN
    assert "no observation has a number there (did you mean number?)" in line.text


def test_a_reward_function_that_takes_long_is_left_behind(
    reward_functions: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("openenv_pipe.extras.check.rewards.LIMIT_S", 0.2)
    line = scored(f"{reward_functions}:blocks", monkeypatch)
    assert line.result is Result.WARN
    assert "takes more than 0.2 s for an episode of random actions" in line.text


def test_a_model_without_a_tokenizer_here_is_not_measured():
    assert load_chat(run_config()) is not None
    settings = ["engine=openai", "engine.model=m", "engine.api_key=null"]
    assert load_chat(compose(["conf=echo", *settings]).config) is None
