"""`env check` against real servers: it finds no fault in a good one, and the fault of each bad
one."""

import json
import re
import tempfile
from pathlib import Path

import psutil
import pytest

from openenv_pipe.commands.findings import Line, Result, as_json, has_failed
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.check import probe_environment, sessions
from openenv_pipe.extras.lab.check.learning import probe_learning
from openenv_pipe.extras.lab.targets import find_target

BAD_ENV = str(Path(__file__).parents[1] / "bad_env")
NUM_EPISODES = 150


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """Assert that no temporary file and no process is left; the speed is measured only briefly."""
    monkeypatch.setattr(sessions, "SPEED_LIMIT_S", 0.2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    assert list(tmp_path.iterdir()) == []
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def check(target: str, *overrides: str, policy: str | None = None) -> dict[str, Line]:
    told: list[str] = []
    found = find_target(target, overrides)
    lines = probe_environment(found, policy=policy, num_episodes=NUM_EPISODES, notify=told.append)
    assert {"protocol", "held-out tasks", "memory"} <= set(told)
    assert json.loads(as_json(lines))["failed"] == has_failed(lines)
    assert sum(line.duration_s for line in lines) > 0
    return {line.name: line for line in lines}


def complaints(lines: dict[str, Line]) -> dict[str, Result]:
    return {name: line.result for name, line in lines.items() if line.result is not Result.OK}


def test_a_good_environment():
    lines = check("echo", policy="echo.policies:perfect")
    assert complaints(lines) == {
        "leaks, expert": Result.WARN,  # Its task is to copy what is shown.
        "held-out tasks": Result.WARN,  # Four of five letters repeat by chance.
    }
    assert {"speed, 1 session", "speed, 8 sessions", "speed, 64 sessions"} <= set(lines)
    assert lines["rewards, scripted"].measured["lowest"] == pytest.approx(1.0)
    assert lines["speed, 1 session"].measured["steps_per_s"] > 0
    assert lines["tasks"].measured == {"tasks": 8, "distinct": 8}
    assert lines["OpenEnv: package"].measured == {"checks": 1, "problems": 0}
    assert lines["OpenEnv: server"].measured == {"checks": 6, "problems": 0}


def test_faults_of_tasks_answers_rewards_and_memory():
    faults = "+env.variables.FAULTS='deaf leak rescored hoard'"
    lines = check(BAD_ENV, faults, "host.sessions_per_server=8")
    assert complaints(lines) == {
        "OpenEnv: package": Result.WARN,  # it declares nothing for OpenEnv's validation
        "same seed": Result.FAIL,
        "reset again": Result.FAIL,
        "fresh session": Result.FAIL,
        "leaks": Result.FAIL,
        "memory": Result.FAIL,
        "step after done": Result.WARN,
        "held-out tasks": Result.WARN,  # seeds that draw from 64 words
    }
    assert "`answer`" in lines["leaks"].text
    assert "observation.hint" in lines["leaks"].text
    assert lines["memory"].measured["bytes_per_episode"] == pytest.approx(200_000, rel=0.2)


def test_faults_of_sessions_and_of_rewards_that_are_all_the_same():
    lines = check(BAD_ENV, "+env.variables.FAULTS='lonely constant'")
    assert complaints(lines) == {
        "OpenEnv: package": Result.WARN,
        "sessions": Result.WARN,
        "learnable": Result.FAIL,
        "step after done": Result.WARN,
        "held-out tasks": Result.WARN,
    }
    assert lines["sessions"].measured == {"opened": 1, "wanted": 64}
    assert "speed, 8 sessions" not in lines


def test_a_step_that_never_ends_is_named_and_ends_the_check():
    quick = ("env.step_timeout_s=2", "host.stop_timeout_s=1", "host.sessions_per_server=8")
    found = find_target(BAD_ENV, ["+env.variables.FAULTS=frozen", *quick])
    told: list[str] = []
    lines = probe_environment(found, policy=None, num_episodes=50, notify=told.append)
    named, server = lines[-2:]
    assert (named.result, server.name, server.result) == (Result.FAIL, "server", Result.FAIL)
    assert re.match(
        r"task (train|eval)/\d+, after \d+ answers: .*raise env\.step_timeout_s", named.text
    )
    assert "not even GET /health within 5 s" in server.text
    assert "memory" in server.text.partition("not tested: ")[2]
    assert "memory" not in told


def test_a_tiny_model_is_trained_for_a_bounded_time():
    """No time at all: the run ends after its first step, of which nothing can be learnt."""
    told: list[str] = []
    words = ["conf=smoke", "trainer.warm_start.steps=0", "trainer.steps=50", "eval.baselines=false"]
    line = probe_learning(words, minutes=0.0, notify=told.append)
    assert line.result is Result.WARN
    assert line.measured["steps"] == 1
    assert line.text.startswith("nothing was proven to be learnt in 1 steps: reward")
    assert any("the time limit is reached" in text for text in told)


def test_only_an_experiment_can_be_learnt():
    with pytest.raises(ConfigError, match="name conf=NAME"):
        probe_learning(["echo"], minutes=1.0, notify=lambda _: None)
