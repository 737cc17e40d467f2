"""How `openenv-pipe env` interprets its target."""

import pytest

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.targets import find_target
from openenv_pipe.system.resources import shipped_dir


def test_a_block_by_name_is_told_as_to_a_model_that_reads():
    target = find_target("wordle", ["env.max_turns=3"])
    env = target.serving.env
    assert (env.name, env.max_turns, target.is_experiment, target.policy) == (
        *("wordle", 3, False, None),
    )
    assert "Wordle" in env.adapter.system
    assert find_target("env=wordle", ["model=tiny"]).serving.env.adapter.system is None


def test_an_experiment_has_its_model_and_its_policy():
    target = find_target("conf=wordle", ["host.num_servers=2"])
    assert (target.is_experiment, target.policy) == (True, "wordle.policies:consistent")
    assert target.serving.host.num_servers == 2
    assert target.serving.env.adapter.system is None


def test_a_folder_and_a_url_need_no_block():
    package = shipped_dir("envs") / "wordle"
    env = find_target(str(package), []).serving.env
    assert (env.package, env.adapter.type) == (str(package), "json")
    serving = find_target("http://127.0.0.1:8000", ["host.sessions_per_server=3"]).serving
    assert (serving.host.type, list(serving.host.urls)) == ("attach", ["http://127.0.0.1:8000"])
    assert serving.host.sessions_per_server == 3


@pytest.mark.parametrize(
    "image", ["my_env:latest", "host:5000/team/env:1.2", "a.example/env@sha256:ab"]
)
def test_an_image_is_told_by_its_tag_or_its_digest(image):
    serving = find_target(image, []).serving
    assert (serving.host.type, serving.host.image) == ("docker", image)
    assert serving.env.package is None


@pytest.mark.parametrize("name", ["host:5000/team/env", "./of:me", "/of:me", "~/of:me"])
def test_what_may_be_a_folder_is_no_image(name):
    with pytest.raises(ConfigError, match="not a folder"):
        find_target(name, [])


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("wordel", [], "did you mean wordle"),
        ("./nowhere", [], "not a folder"),
        ("wordle", ["trainer.steps=3"], "does not concern an environment"),
        ("wordle", ["env.max_turn=3"], "max_turns"),
        ("conf=wordel", [], "wordle"),
    ],
)
def test_what_is_no_target_is_explained(name, overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        find_target(name, overrides)
