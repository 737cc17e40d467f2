"""`trainer.guard` in whole runs: they go back or stop, also if they were killed in between."""

import re

import pytest
import torch
from safetensors.torch import load_file

from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.files import digest_of_file
from tests.commands import run
from tests.crash_matrix import Result, killed_and_resumed, uninterrupted

# Its tasks come in their order, eight in each step, and from step 11 on they earn nothing, except
# in step 13, where they earn the most.
REWARD = """
def falling(episode):
    step = episode.task.index // 8 + 1
    return (step < 11) + 2 * (step == 13) + 0.1 * episode.member
"""
COLLAPSE = 12  # the step after which the mean over five steps has fallen far enough
AT_COLLAPSE, WEIGHTS = f"step_{COLLAPSE:06d}", "model.safetensors"
RATE = 1e-3
RUN = (
    *("conf=echo", "device=cpu", "num_threads=1", "eval.baselines=false", "eval.num_tasks=1"),
    *("env.max_turns=1", "env.tasks.order=seed", "trainer.checkpoint.every=1"),
    *("trainer.steps=16", "trainer.tasks_per_step=8", "trainer.group_size=2"),
    *("trainer.optimizer.type=adamw", f"trainer.optimizer.lr={RATE}"),
    "trainer.optimizer.schedule=constant",
    "trainer.optimizer.final_lr_share=null",
    "reward.terms={falling: {type: python, target: rewards:falling, keywords: {}, weight: 1.0, "
    "per_turn: false, use: sum}}",
)


def rates(folder):
    return [record.get("lr") for record in read_metrics(folder / "metrics.jsonl")]


def without_evaluations(folder):
    """Return a result without evaluations: a run that was made longer has two at an end."""
    found = Result.of(folder)
    kept = {name: each for name, each in found.digests.items() if not name.startswith("eval/")}
    return Result(found.metrics, kept)


@pytest.fixture
def folders(tmp_path):
    """Return two folders of runs, each with the module of the reward."""
    made = [tmp_path / name for name in ("whole", "killed")]
    for folder in made:
        folder.mkdir()
        (folder / "rewards.py").write_text(REWARD)
    return made


def test_a_run_goes_back_to_its_best_weights_and_is_the_same_after_kills(folders):
    """It is killed before it goes back, and after that."""
    settings = (*RUN, "trainer.guard=back")
    whole = uninterrupted(folders[0], settings, "echo")
    expected = [RATE] * COLLAPSE + [pytest.approx(RATE / 3)] * (16 - COLLAPSE)
    assert rates(whole.folder) == expected
    trial = killed_and_resumed(folders[1], settings, "echo", [(COLLAPSE, 0.0), (14, 0.0)])
    assert len(trial.kills) == 2
    assert not any(trial.codes), trial.said
    assert RunFolder.open(trial.folder).status == "finished"
    assert Result.of(trial.folder).difference(Result.of(whole.folder)) is None


def test_the_checkpoint_of_a_collapse_has_the_weights_that_the_run_goes_on_with(folders):
    """What is measured of them next is credited to that checkpoint. Its resume is the same run."""
    settings = (*RUN, "trainer.guard=back", "eval.during.every=0", "trainer.loss.kl.coef=0.1")
    settings += ("trainer.loss.kl.refresh_every=11",)
    whole = uninterrupted(folders[0], settings, "echo").folder / "checkpoints"
    first = tuple(each for each in settings if each != "trainer.steps=16")
    code, _, err = run(folders[1], "train", *first, f"trainer.steps={COLLAPSE}")
    assert code == 0, err
    (left,) = re.findall(r"going back to (step_\d+), with a learning rate of 0.000333", err)
    folder = folders[1] / "runs/echo/0001"
    at_collapse = folder / "checkpoints" / AT_COLLAPSE
    weights = load_file(at_collapse / WEIGHTS).values()
    reference = load_file(at_collapse / "resume" / "reference.safetensors").values()
    assert all(any(torch.equal(one, other) for other in weights) for one in reference)
    for checkpoints in (whole, folder / "checkpoints"):
        weights = [digest_of_file(checkpoints / name / WEIGHTS) for name in (left, AT_COLLAPSE)]
        assert weights[0] == weights[1]
    assert digest_of_file(whole / "step_000011" / WEIGHTS) != weights[0]
    assert (whole / "best").readlink().name == AT_COLLAPSE
    code, _, err = run(folders[1], "train", "--resume", str(folder), "trainer.steps=16")
    assert code == 0, err
    assert "going back" not in err
    assert without_evaluations(folder).difference(without_evaluations(whole.parent)) is None


def test_a_run_stops_and_says_why(folders):
    code, _, err = run(folders[0], "train", *RUN, "trainer.guard=stop")
    assert code == 0, err
    assert "alarm: The reward has fallen from 1.0" in err
    folder = folders[0] / "runs/echo/0001"
    assert len(rates(folder)) == COLLAPSE
    cause = RunFolder.open(folder).record.cause
    assert cause.startswith(f"stopped by trainer.guard=stop after step {COLLAPSE}: The reward has")
    for guard, expected in (("back", 2), ("warn", 0)):
        code, _, err = run(folders[0], "train", "--resume", str(folder), f"trainer.guard={guard}")
        assert code == expected, err
        assert ("trainer.guard: 'stop' -> 'back'" in err) == (guard == "back")
    assert len(rates(folder)) == 16
