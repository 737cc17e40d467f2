"""Gymnasium's environments behind OpenEnv's types, without a server."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("gymnasium")
import numpy as np
from gymnasium import spaces
from gymnasium_env import policies
from gymnasium_env.server.gymnasium_environment import GymnasiumEnvironment
from gymnasium_env.source import Source, without_colors
from gymnasium_env.spaces import SpaceError, action_model, as_text, plain

pytestmark = pytest.mark.slow

ENVS = Path(__file__).parents[2] / "envs"
MODULE = '''
"""Registers environments, as a module of a user does."""
import gymnasium
import numpy as np
from gymnasium import spaces


class Guess(gymnasium.Env):
    """Guess the word.

    ## Action Space
    A word.
    """

    action_space = spaces.Text(min_length=1, max_length=3, charset="ab")
    observation_space = spaces.Dict(
        {"hint": spaces.Text(5, charset="xyz"), "near": spaces.Box(0, 1, (2,), np.float32)}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = (options or {}).get("word") or str(self.np_random.choice(["a", "b"]))
        return self._observation(), {}

    def step(self, action):
        is_right = action == self.word
        info = {"is_success": is_right}
        return self._observation(), float(is_right), is_right, not is_right, info

    def _observation(self):
        return {"hint": "x", "near": np.array([1 / 3, 1], np.float32)}


class Frames(Guess):
    observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)


gymnasium.register("Guess-v0", Guess)
gymnasium.register("Frames-v0", Frames)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "gymnasium_words.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return str(tmp_path)


def opened(source: Source) -> tuple[GymnasiumEnvironment, type[Any]]:
    return GymnasiumEnvironment(source), action_model(source.action_space)


def play(env_id: str, keywords: str = "{}", seed: int = 0) -> list[dict[str, Any]]:
    """Play an episode of random actions; return its observations."""
    env, action = opened(Source(env_id, keywords, ""))
    rng, seen = random.Random(seed), [env.reset(seed=seed).model_dump()]
    while not seen[-1]["done"]:
        reply = policies.random_action(seen, rng)
        seen.append(env.step(action(action=reply)).model_dump())
    env.close()
    return seen


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Blackjack-v1", "CartPole-v1"])
def test_episodes_repeat_by_their_seeds_and_end(env_id):
    episode = play(env_id)
    assert episode == play(env_id)
    assert episode[-1]["terminated"] or episode[-1]["truncated"]
    assert len({json.dumps(play(env_id, seed=seed)) for seed in range(5)}) == 5
    assert [each["legal_actions"] for each in episode[-2:]] == [[*episode[0]["legal_actions"]], []]


def test_a_limit_of_steps_truncates():
    episode = play("CliffWalking-v1", '{"max_episode_steps": 3}')
    assert len(episode) == 4
    assert (episode[-1]["terminated"], episode[-1]["truncated"]) == (False, True)


def test_the_first_observation_has_the_rules_and_the_bounds():
    first, *others = play("FrozenLake-v1")
    assert "An action is an integer from 0 to 3." in first["rules"]
    assert "- 3: Move up" in first["rules"] and "Discrete(16)" in first["rules"]
    assert "Starting State" not in first["rules"]
    assert all(each["rules"] == "" for each in others)


def test_a_drawing_is_text_whose_colours_are_marks():
    first = play("FrozenLake-v1")[0]
    assert (first["text"], first["value"]) == ("[S]FFF\nFHFH\nFFFH\nHFFG", 0)
    assert without_colors("\x1b[34;1mB\x1b[0m\x1b[43m \x1b[0m\x1b[1mx\x1b[0m") == "(blue B)[ ]x"
    assert without_colors("no colour") == "no colour"
    blackjack = play("Blackjack-v1")[0]
    assert json.loads(blackjack["text"]) == blackjack["value"]
    assert play("FrozenLake-v1", '{"render_mode": "rgb_array"}')[0]["text"] == "0"


def test_a_mask_of_the_info_says_what_is_legal():
    env = GymnasiumEnvironment(Source("Taxi-v4", "{}", ""))
    assert 0 < len(env.reset(seed=0).legal_actions) < 6
    env.close()


def test_an_action_before_the_reset_and_after_the_end_earns_nothing():
    env, action = opened(Source("CliffWalking-v1", '{"max_episode_steps": 1}', ""))
    early = env.step(action(action=0))
    assert (early.done, early.reward, "Reset" in early.message) == (True, 0.0, True)
    env.reset(seed=0)
    assert env.step(action(action=0)).done
    late = env.step(action(action=0))
    assert (late.done, late.reward, env.state.step_count) == (True, 0.0, 1)
    env.close()


def test_a_module_of_the_users_registers_its_environment(folder):
    env, action = opened(Source("gymnasium_words:Guess-v0", "{}", folder))
    first = env.reset(seed=0, word="ab")
    assert first.rules.startswith("Guess the word.") and "A word." in first.rules
    assert json.loads(first.text) == {"hint": "x", "near": [0.3333, 1.0]}
    assert (first.legal_actions, first.is_success) == ([], None)
    end = env.step(action(action="ab"))
    assert (end.done, end.reward, end.is_success, end.terminated) == (True, 1.0, True, True)
    env.reset(seed=0, word="ab")
    end = env.step(action(action="ba"))
    assert (end.done, end.is_success, end.truncated) == (True, False, True)


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Discrete(3, start=-1), [-1, 1, "0"], [2, -2, "left", None, [0], 0.5]),
        (
            spaces.MultiDiscrete([2, 3]),
            [[0, 2], "[1, 0]"],
            [[2, 0], [0], [0, 0, 0], 1, "01", "[2, 0]", "[1", "[" * 9999],
        ),
        (spaces.MultiBinary(2), [[0, 1]], [[0, 2], [1], "01"]),
        (spaces.Text(3, min_length=1, charset="ab"), ["a", "bab"], ["", "abab", "c", 1]),
    ],
)
def test_the_actions_type_accepts_the_values_of_the_space_alone(space, good, bad):
    model = action_model(space)
    for value in good:
        model(action=value)
    for value in bad:
        with pytest.raises(ValidationError):
            model(action=value)
    assert model.model_json_schema()["properties"]["action"]["description"]


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 1, (1,)), spaces.Dict({}), spaces.MultiDiscrete([[2], [3]])]
)
def test_an_action_space_without_a_text_is_named(space):
    with pytest.raises(SpaceError, match="expected Discrete, MultiDiscrete or MultiBinary"):
        action_model(space)


@pytest.mark.parametrize(
    ("env_id", "keywords", "expected"),
    [
        ("FrozenLake", "[]", r"GYM_KWARGS='\[\]': expected an object"),
        ("FrozenLake", "{x}", "GYM_KWARGS='{x}' is not JSON"),
        ("FrozenPond-v1", "{}", "GYM_ID='FrozenPond-v1'.*FrozenLake"),
        ("FrozenLake-v1", '{"size": 3}', "GYM_ID='FrozenLake-v1' with .*size"),
        ("no_such_module:Any-v0", "{}", "GYM_ID='no_such_module:Any-v0'.*no_such_module"),
        ("gymnasium_words:Frames-v0", "{}", "have more than 1000 numbers"),
    ],
)
def test_what_cannot_be_served_is_named_by_its_variable(folder, env_id, keywords, expected):
    with pytest.raises(ValueError, match=expected):
        Source(env_id, keywords, folder)


def test_a_server_that_cannot_start_says_why_without_a_traceback():
    code = "import gymnasium_env.server.app"
    variables = {**os.environ, "GYM_ID": "FrozenPond-v1", "PYTHONPATH": str(ENVS)}
    ended = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    assert ended.returncode == 1
    assert ended.stderr.decode().startswith("GYM_ID='FrozenPond-v1' with GYM_KWARGS={}: ")
    assert b"Traceback" not in ended.stderr


def test_values_of_all_spaces_are_plain():
    value = {"a": (np.int64(1), np.array([[0.25]], np.float32)), 2: "text", "n": np.float64(1 / 3)}
    assert plain(value) == {"a": [1, [[0.25]]], "2": "text", "n": 1 / 3}
    assert as_text(plain(value)) == '{"a": [1, [[0.25]]], "2": "text", "n": 0.3333}'
    assert as_text("a text") == "a text"
