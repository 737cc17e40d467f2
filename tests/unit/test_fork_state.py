"""What a fork takes over from a checkpoint, and what it names as left out."""

import json

import pytest
import run_samples
from fakes import random_samples, run_config, tiny_policy

from openenv_pipe.config.compose import amend
from openenv_pipe.learner.checkpoint import OPTIMIZER, PROGRESS, REFERENCE, load_progress
from openenv_pipe.learner.learner import Learner
from openenv_pipe.pipeline.fork_state import LOST_REFERENCE, copy_checkpoint
from openenv_pipe.pipeline.league import LEAGUE
from openenv_pipe.pipeline.source_state import ORDER
from openenv_pipe.pipeline.start import _changes
from openenv_pipe.runs.checkpoints import RESUME, StageStep, find_damage, new_checkpoint

SECRET = "abcdef-0123456789-abcdef"
LEFT = "the optimizer, which was deleted there"
ROUNDS = {"trainer.max_sampling_rounds": 3, "trainer.loss.normalise_groups": "with_signal"}


def saved(tmp_path, step, resume=None):
    """Save a checkpoint of a run, with the files of `resume`; None: it cannot be resumed."""
    at = StageStep("grpo", step)
    with new_checkpoint(tmp_path / "run", at) as path:
        (path / "model.safetensors").touch()
        if resume is not None:
            (path / RESUME).mkdir()
            for name, text in resume.items():
                (path / RESUME / name).write_text(text)
    return tmp_path / "run" / "checkpoints" / at.name


@pytest.mark.parametrize(
    ("every", "is_resumable", "changed", "left_out"),
    [
        (2, False, {}, [LEFT, "the league"]),
        (9, False, {}, [LEFT]),  # nothing had joined
        (None, False, {}, [LEFT]),
        (2, True, {}, []),
        (2, True, {"seed": [0, 5]}, ["the order of tasks"]),
        (2, True, {"env.players.league.size": [2, 3]}, ["the league"]),
    ],
)
def test_a_fork_names_the_league_if_it_is_lost(tmp_path, every, is_resumable, changed, left_out):
    league = {"every": every, "size": 2, "share": 0.5} if every else None
    roles = {"x": "policy", "o": "policy"}
    players = {"roles": roles, "turn": "turn", "rewards": "rewards", "league": league}
    checkpoint = saved(tmp_path, 4, {ORDER: "", LEAGUE: ""} if is_resumable else None)
    config = run_config({"env.players": players})
    assert copy_checkpoint(checkpoint, tmp_path / "fork", config, config, changed) == left_out
    (copied,) = tmp_path.glob("fork/checkpoints/step_000004/resume")
    kept = {path.name for path in copied.iterdir()}
    assert (LEAGUE in kept) == (is_resumable and "the league" not in left_out)


def test_a_fork_of_old_weights_keeps_the_reference_that_other_checkpoints_have(tmp_path):
    """The newest one that has it undamaged gives it; the new checkpoint has its digest."""
    checkpoint = saved(tmp_path, 4)
    saved(tmp_path, 6, {REFERENCE: "the policy before the first step"})
    damaged = saved(tmp_path, 8, {REFERENCE: "the policy before the first step"})
    (damaged / RESUME / REFERENCE).write_text("damaged")
    saved(tmp_path, 9, {})
    config = run_config({"trainer.loss.kl.coef": 0.1})
    assert copy_checkpoint(checkpoint, tmp_path / "fork", config, config, {}) == [LEFT]
    copied = tmp_path / "fork" / "checkpoints" / checkpoint.name
    assert (copied / RESUME / REFERENCE).read_text() == "the policy before the first step"
    assert find_damage(copied) is None


@pytest.mark.parametrize(
    ("step", "before", "now", "is_lost"),
    [
        (4, {}, {}, True),  # no other checkpoint has it undamaged
        (4, {"refresh_every": 3}, {"refresh_every": 3}, True),
        (4, {"refresh_every": 2}, {"refresh_every": 2}, False),  # the next step refreshes it
        (4, {"refresh_every": 2}, {}, True),
        (0, {}, {}, False),  # it is the policy before the first step
        (4, {"coef": 0.0}, {}, False),
        (4, {}, {"coef": 0.0}, False),
        (4, {"hint": "feedback"}, {"hint": "feedback"}, False),
    ],
)
def test_a_fork_says_that_other_weights_are_the_reference(tmp_path, step, before, now, is_lost):
    checkpoint = saved(tmp_path, step)
    newer = saved(tmp_path, 6, {REFERENCE: "of step 6"})
    if not before.get("refresh_every"):
        (newer / RESUME / REFERENCE).write_text("damaged")
    configs = [
        run_config({f"trainer.loss.kl.{key}": value for key, value in ({"coef": 0.1} | kl).items()})
        for kl in (before, now)
    ]
    left_out = copy_checkpoint(checkpoint, tmp_path / "fork", *configs, {})
    assert left_out == [LEFT, LOST_REFERENCE][: 1 + is_lost]
    copied = tmp_path / "fork" / "checkpoints" / checkpoint.name
    assert not (copied / RESUME / REFERENCE).exists() and find_damage(copied) is None


@pytest.mark.parametrize(
    ("before", "changed", "left_out"),
    [
        ({}, {}, []),
        ({"env.tasks.order": "seed"}, {"trainer.steps": [4, 9]}, []),
        ({"env.tasks.order": "curriculum_by_cost"}, {}, ["the order of tasks"]),
        (
            {"env.tasks.order": {"type": "python", "target": "a:b", "options": {}}},
            {},
            ["the order of tasks"],
        ),
        (ROUNDS, {}, ["the order of tasks"]),
        ({}, {"trainer.tasks_per_step": [2, 4]}, ["the order of tasks"]),
        ({"trainer.max_staleness": 2}, {}, ["the groups played ahead"]),
    ],
)
def test_a_fork_of_old_weights_names_the_state_of_tasks(tmp_path, before, changed, left_out):
    """Shuffled or listed tasks follow from the step alone."""
    config = run_config(before)
    found = copy_checkpoint(saved(tmp_path, 4), tmp_path / "fork", config, config, changed)
    assert found == [LEFT, *left_out]


@pytest.mark.parametrize(
    ("taken", "changes"),
    [
        (6, {"optimizer.type": "muon"}),
        (6, {"updates_per_step": 1}),
        (6, {"updates_per_step": 4, "passes_per_step": 2}),
        (2, {"updates_per_step": 1}),  # the weights of step 1: steps 2 and 3 had no samples
        (None, {}),  # the checkpoint has only weights, and another one the reference
    ],
)
def test_a_fork_refreshes_the_reference_in_the_steps_of_its_run(tmp_path, taken, changes):
    """The run has two updates in a step, and the checkpoint is that of step 3."""
    resume = {OPTIMIZER: "", PROGRESS: json.dumps({"optimizer_steps": taken}), ORDER: ""}
    checkpoint = saved(tmp_path, 3, resume if taken else None)
    kl = {"trainer.loss.kl.coef": 0.1, "trainer.loss.kl.refresh_every": 2}
    before = kl | {"trainer.updates_per_step": 2}
    now = run_config(before | {f"trainer.{key}": value for key, value in changes.items()})
    changed = {f"trainer.{key}": [None, value] for key, value in changes.items()}
    copy_checkpoint(checkpoint, tmp_path / "fork", run_config(before), now, changed)
    copied = tmp_path / "fork" / "checkpoints" / checkpoint.name / RESUME
    (copied / OPTIMIZER).unlink(missing_ok=True)  # its moments do not matter here
    policy = tiny_policy()
    learner = Learner(policy, now.trainer, max_episode_tokens=120, seed=0)
    load_progress(copied, policy, learner.optimizer)
    refreshed = []
    for step in range(4, 8):
        reference = policy.reference
        learner.update(random_samples(0), step)
        refreshed += [step] if policy.reference is not reference else []
    assert refreshed == ([4, 5, 7] if taken == 2 else [5, 7])


@pytest.mark.parametrize("is_set", [True, False])
def test_a_secret_that_a_resume_or_fork_replaces_is_not_asked_for(tmp_path, monkeypatch, is_set):
    """One that is given again as it was is no change, if the environment has it too."""
    key = f"env.variables.API_TOKEN={SECRET}"
    tracker = ["tracker=otlp", f"+tracker.otlp.headers.api_key={SECRET}-2"]
    folder = run_samples.create(tmp_path, amend(run_samples.config(tmp_path), [key, *tracker]))
    if is_set:
        monkeypatch.setenv("API_TOKEN", SECRET)
    config = folder.config_to_run([key, "tracker=none"])
    assert config.env.variables["API_TOKEN"] == SECRET
    keys = _changes(folder, config).keys()
    assert "tracker.otlp.type" in keys and ("env.variables.API_TOKEN" in keys) is not is_set
