"""A plugin package is installed, listed, checked, and trains with its parts alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import LIMIT_S, REPOSITORY, servers_of

PACKAGE = REPOSITORY / "tests" / "plugin_package"
SMALL = ("device=cpu", "num_threads=1")
SCALE, BONUS = 2.0, 0.5  # options of the experiment's loss and advantages


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder that the package is installed into, beside what is installed already."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(folder)]
    subprocess.run([*pip, *offline, str(PACKAGE)], check=True, timeout=LIMIT_S)
    return folder


def openenv_pipe(folder: Path, site: Path, *arguments: str) -> str:
    """What the command prints, as a user of the plugin has it in an empty folder."""
    done = subprocess.run(
        [sys.executable, "-m", "openenv_pipe.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{site}:{REPOSITORY}", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert servers_of(folder) == []
    return done.stdout


@pytest.fixture(scope="module")
def trained(site, tmp_path_factory) -> RunFolder:
    """The run of the plugin's experiment."""
    folder = tmp_path_factory.mktemp("plugin_run")
    openenv_pipe(folder, site, "train", "conf=counting", *SMALL)
    return RunFolder.open(folder / "runs" / "counting" / "0001")


def test_the_plugin_is_listed_with_what_it_brings(site, tmp_path):
    lines = openenv_pipe(tmp_path, site, "plugins").splitlines()
    (first,) = [line for line in lines if line.split()[:1] == ["example"]]
    assert "openenv-pipe-example-plugin 0.1.0" in first
    brought = [line.split()[-1] for line in lines[1:]]
    assert brought == [
        *("conf=counting", "env=counting", "tracker=lines", "tracker=typed_lines"),
        "env.package=counting",
    ]


def test_check_builds_every_part(site, tmp_path):
    """Also the tracker, which is a type of the plugin's own with its own keys."""
    text = openenv_pipe(tmp_path, site, "check", "conf=counting", "tracker=typed_lines", *SMALL)
    for name in ("losses:reinforce", "advantages:against_the_best"):
        assert f"example_plugin.{name}" in text
    for name in ("hosts:NiceHost", "engines:CountingEngine"):
        assert f"example_plugin.{name}" in text
    assert re.search(r"tracker +ok +lines", text)


def test_the_tracker_got_every_record_once(trained):
    lines = (trained.path / "lines.jsonl").read_text().splitlines()
    records = read_metrics(trained.metrics_path)
    assert [json.loads(line) for line in lines] == records
    assert [(record["stage"], record["step"]) for record in records] == [
        ("grpo", step) for step in (1, 2, 3)
    ]


def test_the_loss_and_the_advantages_are_the_plugins(trained):
    """The first step is on policy: the sampler's logprobs are the trainer's."""
    losses = []
    for group in read_episodes(trained.path / "episodes" / "step_000001.jsonl.gz"):
        best = max(episode.reward for episode in group.scored)
        for episode in group.scored:
            advantage = episode.reward - best + BONUS
            logprobs = [value for turn in episode.turns for value in turn.logprobs]
            losses.append(-SCALE * advantage * fmean(logprobs))
    first = read_metrics(trained.metrics_path)[0]
    assert first["loss/policy"] == pytest.approx(fmean(losses), rel=1e-3)
    assert first["loss/policy"] > 0.1


def test_tasks_rewards_and_tokens_are_by_the_plugin(trained):
    for step, expected in ((1, [0, 3]), (2, [6, 1]), (3, [4, 7])):
        groups = read_episodes(trained.path / "episodes" / f"step_{step:06d}.jsonl.gz")
        assert [group.task.index for group in groups] == expected
        for episode in (episode for group in groups for episode in group.episodes):
            num_brief = sum(len(turn.reply) <= 7 for turn in episode.turns)
            assert episode.reward_terms["brief"] == num_brief
            assert len(episode.turns) == 3
    counts = [record["engine/num_completions"] for record in read_metrics(trained.metrics_path)]
    assert counts[1:] == [2 * 2 * 3] * 2  # the first one has those of the evaluation before it too


def test_the_record_has_digests_of_every_part(trained):
    assert set(trained.record.facts["callables"]) == {
        f"example_plugin.{name}"
        for name in (
            "adapters:NumberAdapter",
            "advantages:against_the_best",
            "engines:CountingEngine",
            "hosts:NiceHost",
            "losses:reinforce",
            "orders:EveryNth",
            "rewards:brief",
            "trackers:LinesTracker",
        )
    }
