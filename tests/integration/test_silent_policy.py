"""An environment where every action costs something and an unusable reply nothing.

Never acting is the best policy there, and GRPO finds it. Every command warns of that, and with the
reward that `env inspect` writes the model learns to act.
"""

import contextlib
from pathlib import Path
from statistics import fmean

import pytest
from wild_envs import write_packages

from openenv_pipe.commands.findings import Result
from openenv_pipe.extras.lab.check import probe_environment, sessions
from openenv_pipe.extras.lab.inspect import inspect_environment
from openenv_pipe.extras.lab.targets import find_target
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import SMALL, run

QUICK = (*SMALL, "eval.num_tasks=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the environment `auction`."""
    folder = tmp_path_factory.mktemp("silent")
    write_packages(folder)
    return folder


@pytest.fixture(scope="module")
def inspection(folder):
    """What `env inspect` writes and says of `auction`."""
    with contextlib.chdir(folder):
        target = find_target("./envs/auction", [])
        return inspect_environment(target, Path("conf/env/auction.yaml"))


def test_inspect_warns_and_writes_a_penalty(inspection):
    (note,) = (each for each in inspection.notes if "never acting earns 0" in each)
    assert "takes 1 for each unusable reply" in note
    assert "override /reward: usable" in inspection.experiment


def test_check_compares_never_acting_with_acting(folder, inspection, monkeypatch):
    monkeypatch.setattr(sessions, "SPEED_LIMIT_S", 0.2)
    monkeypatch.chdir(folder)
    target = find_target("conf=auction", ["reward.terms.unusable.weight=0"])
    lines = probe_environment(target, policy=None, num_episodes=20, notify=lambda _: None)
    (line,) = (line for line in lines if line.name == "never acting")
    assert line.result is Result.WARN
    assert "reward.terms.unusable.weight=-1" in line.text


def trained(folder: Path, runs_dir: str, *settings: str) -> tuple[str, str, list[dict[str, float]]]:
    """Return what the run printed, its report, and the metrics of its steps."""
    code, out, err = run(folder, "train", "conf=auction", f"runs_dir={runs_dir}", *QUICK, *settings)
    assert code == 0, err
    run_folder = folder / runs_dir / "auction" / "0001"
    report = (run_folder / "report.md").read_text()
    return out + err, report, list(read_metrics(run_folder / "metrics.jsonl"))


def test_a_run_that_learns_not_to_act_says_so(folder, inspection):
    printed, report, steps = trained(
        folder, "silent", "trainer.steps=16", "reward.terms.unusable.weight=0"
    )
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"], "which looks like success"
    assert fmean(step["replies/unusable"] for step in steps[-3:]) > 0.9
    for text in (printed, report):
        assert "the model learns not to act" in text


def test_with_the_reward_of_inspect_the_model_learns_to_act(folder, inspection):
    printed, report, steps = trained(folder, "acting", "trainer.steps=32")
    before, after = (
        fmean(step["replies/unusable"] for step in part) for part in (steps[:3], steps[-3:])
    )
    assert before > 0.6 and after < 0.3
    first, last = (fmean(step["reward/mean"] for step in part) for part in (steps[:3], steps[-3:]))
    assert first < -0.7 and last > -0.5
    assert "learns not to act" not in printed + report
