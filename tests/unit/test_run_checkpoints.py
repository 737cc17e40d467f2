"""Which checkpoints a run keeps, judged by its own metrics."""

import math
from contextlib import closing
from random import Random
from types import SimpleNamespace

import pytest
import run_samples
import torch
from fakes import run_config, tiny_policy

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.checkpoint import load_weights
from openenv_pipe.pipeline.checkpoints import Saver, measured_by_step
from openenv_pipe.pipeline.replay import Replay
from openenv_pipe.runs.checkpoints import (
    StageStep,
    checkpoint_path,
    find_damage,
    is_passing,
    is_resumable,
)
from openenv_pipe.runs.evals import save_evaluation
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import MetricsFile, read_metrics
from openenv_pipe.runs.rewind import rewind
from openenv_pipe.types import Status

SOURCE = SimpleNamespace(save=lambda folder: None)


@pytest.fixture
def folder(tmp_path):
    return run_samples.create(tmp_path)


def saver_of(folder, *, metric="reward/mean", direction="max", keep_last=None, resumable=2):
    """Return a saver, and the policy whose first weight says which step has made its weights."""
    keep = {"every": 1, "every_minutes": None, "num_resumable": resumable, "keep_last": keep_last}
    keep["best"] = {"metric": metric, "direction": direction}
    policy, said = tiny_policy(), []
    config = run_config({"eval.during.every": 2, "trainer.checkpoint": keep})
    saver = Saver(config, folder, policy, SOURCE, Replay(None, 0), said.append)
    return saver, policy, said


def run(folder, values, *, every=1, **options):
    """Take steps as the stage does: these are the values of their episodes; None: no value.

    Returns the steps whose checkpoints are kept, and the notes.
    """
    saver, policy, said = saver_of(folder, **options)
    first = 1 + len(read_metrics(folder.metrics_path))
    with closing(MetricsFile(folder.metrics_path)) as file:
        for step, value in enumerate(values, start=first):
            metrics = {} if value is None else {"reward/mean": value}
            saver.save_if_best(step - 1, metrics)
            mark(policy, step)
            file.append({"stage": "grpo", "step": step, "lr": 1.0, **metrics})
            if step % every == 0:
                saver.save(StageStep("grpo", step), None)
    return kept_in(folder), said


def mark(policy, step):
    with torch.no_grad():
        next(iter(policy.model.parameters())).fill_(step)


def kept_in(folder):
    return [StageStep.of(path).step for path in folder.checkpoints()]


def best_of(folder):
    """Return the step that has made the weights of the best checkpoint."""
    best = folder.path / "checkpoints" / "best"
    step = int(best.readlink().name.removeprefix("step_"))
    policy = tiny_policy()
    load_weights(best, policy)
    assert next(iter(policy.model.parameters())).unique().tolist() == [step]
    return step


@pytest.mark.parametrize(
    ("direction", "values", "best", "kept"),
    [
        # A value is about the weights of the step before, so the last weights have none.
        ("max", [0.0, 0.1, 0.9, 0.4, 0.9, 0.2], 2, [2, 6]),
        ("min", [0.0, 0.4, 0.3, 0.5, 0.6], 2, [2, 5]),
        ("max", [0.0, 0.1, 0.2, 0.3], 3, [3, 4]),
        ("max", [9.0, 0.0, -1.0, -2.0], 1, [1, 4]),
    ],
)
def test_the_best_by_a_metric_stays_beside_the_last(folder, direction, values, best, kept):
    options = {"direction": direction, "keep_last": 1, "resumable": 1}
    assert run(folder, values, **options) == (kept, [])
    assert best_of(folder) == best


@pytest.mark.parametrize("every", [1, 5, 50])
def test_a_peak_between_checkpoints_is_saved_with_the_weights_that_had_it(folder, every):
    """The episodes of step 14 are played by the weights of step 13, and are the best."""
    values = [0.1 + 0.01 * step for step in range(13)] + [0.81] + [0.3] * 11
    kept, _ = run(folder, values, every=every)
    assert best_of(folder) == 13
    assert kept == sorted({13, *range(every, 26, every)})
    assert not is_resumable(checkpoint_path(folder.path, StageStep("grpo", 13)))


def test_the_first_of_equally_good_weights_is_the_best(folder):
    assert run(folder, [0.1, 0.5, 0.5, 0.5], every=50) == ([1], [])


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5"])
def test_what_is_no_number_is_never_the_best(folder, value):
    saver, _, _ = saver_of(folder)
    saver.save_if_best(3, {"reward/mean": value})
    assert kept_in(folder) == []
    saver.save_if_best(4, {"reward/mean": -1.0})
    assert kept_in(folder) == [4]


def test_untrained_weights_are_not_saved(folder):
    assert run(folder, [0.9, 0.1], every=50) == ([1], [])


def test_a_kill_finds_the_best_of_the_steps_that_it_goes_back_to(folder):
    """Steps 1 to 5 are done, and step 4 can be resumed: a better one after it is played again."""
    kept, _ = run(folder, [0.0, 0.6, 0.1, 0.2, 0.3, 0.9], every=4)
    assert (kept, best_of(folder)) == ([1, 4, 5], 5)
    rewind(RunFolder.open(folder.path), StageStep("grpo", 4))
    saver, _, _ = saver_of(folder)
    saver.tidy()
    assert (kept_in(folder), best_of(folder)) == ([1, 4], 1)
    saver.save_if_best(4, {"reward/mean": 0.5})
    assert best_of(folder) == 1


def take_step(folder, saver, step, value):
    """Take a step with episodes of this value, and save no checkpoint."""
    saver.save_if_best(step - 1, {"reward/mean": value})
    with closing(MetricsFile(folder.metrics_path)) as file:
        file.append({"stage": "grpo", "step": step, "lr": 1.0, "reward/mean": value})


@pytest.mark.parametrize("passing", [True, False])
def test_the_best_can_be_saved_again_to_go_on_from_it(folder, passing):
    saver, _, _ = saver_of(folder)
    saver.save_if_best(7, {"reward/mean": 1.0})
    assert not saver.is_saved(StageStep("grpo", 7))
    saver.save(StageStep("grpo", 7), None, passing=passing)
    assert saver.is_saved(StageStep("grpo", 7))
    take_step(folder, saver, 8, 1.0)
    take_step(folder, saver, 9, 2.0)
    saver.save(StageStep("grpo", 9), None)
    assert kept_in(folder) == ([8, 9] if passing else [7, 8, 9])


def test_the_last_checkpoint_is_kept_if_an_interrupted_attempt_wrote_it(folder):
    """The run ends there after all, with fewer steps than were planned."""
    saver, _, _ = saver_of(folder)
    at = StageStep("grpo", 7)
    path = checkpoint_path(folder.path, at)
    saver.save(at, None, passing=True)
    saver.keep_last(at)
    assert not is_passing(path) and is_resumable(path) and find_damage(path) is None
    saver.save(StageStep("grpo", 9), None)
    assert kept_in(folder) == [7, 9]
    saver.keep_last(at)


def test_a_checkpoint_saved_by_time_stays_as_the_best(folder):
    saver, policy, _ = saver_of(folder)
    mark(policy, 7)
    saver.save(StageStep("grpo", 7), None, passing=True)
    take_step(folder, saver, 8, 1.0)
    saver.save(StageStep("grpo", 9), None)
    assert (kept_in(folder), best_of(folder)) == ([7, 9], 7)
    assert not is_resumable(checkpoint_path(folder.path, StageStep("grpo", 7)))


def test_metrics_belong_to_the_weights_that_have_played_the_episodes():
    """With `max_staleness` these are older; a step without samples makes no new weights."""
    records = [
        {"step": 1, "lr": 1.0, "it": 0.1, "staleness/mean": 0.0},
        {"step": 2, "lr": 1.0, "it": 0.3, "staleness/mean": 1.0},
        {"step": 3, "it": 0.5, "staleness/mean": 1.0},
        {"step": 4, "lr": 1.0, "it": 0.7, "staleness/mean": 1.0},
        {"step": 5, "lr": 1.0, "it": None, "staleness/mean": 0.0},
        {"step": 6, "lr": 1.0, "staleness/mean": 0.0},
        {"step": 7, "lr": 1.0, "it": 0.9},
    ]
    assert measured_by_step(records, "it") == pytest.approx({0: 0.2, 1: 0.6, 6: 0.9})


def test_the_best_by_an_evaluation_is_saved_after_it(folder):
    saver, policy, _ = saver_of(folder, metric="eval/success")
    for step, success in ((2, 0.25), (4, 0.75), (6, 0.5)):
        mark(policy, step)
        run_samples.evaluate(folder, f"during_{step:06d}", success, step=step)
        saver.save_if_best(step)
        saver.save_if_best(step, {"eval/success": 9.0})  # metrics of training do not count
    assert (kept_in(folder), best_of(folder)) == ([4], 4)


def test_a_step_without_the_metric_keeps_its_checkpoint(folder):
    """Nothing is known of the weights of steps 2 and 5."""
    kept, said = run(folder, [0.0, 0.3, None, 0.1, 0.2], keep_last=1)
    assert (kept, best_of(folder)) == ([1, 2, 5], 1)
    assert len(said) == 1 and "metrics of step 3" in said[0]


def test_a_wrong_name_deletes_nothing_and_is_said_once(folder):
    kept, said = run(folder, [0.1, 0.2, 0.3], metric="reward/men", keep_last=1)
    assert kept == [1, 2, 3]
    (text,) = said
    assert "did you mean reward/mean" in text
    assert not (folder.path / "checkpoints" / "best").exists()


def test_an_evaluation_of_few_scored_tasks_names_no_best_checkpoint(folder):
    saver, policy, _ = saver_of(folder, metric="eval/success")
    for step, num_scored in ((1, 10), (2, 1)):
        played = [run_samples.episode(Random(0), i, 0, success=step == 2) for i in range(10)]
        for each in played[num_scored:]:
            each.status = Status.ERROR
        save_evaluation(
            folder.path, run_samples.evaluation(folder, f"during_00000{step}", played, step)
        )
        mark(policy, step)
        saver.save_if_best(step)
    assert (kept_in(folder), best_of(folder)) == ([1], 1)


def evaluate(folder, saver, policy, step, successes, *, samples=1):
    """Evaluate the weights of a step as the stage does: `successes` has one for each task."""
    mark(policy, step)
    played = [
        run_samples.episode(Random(0), index, member, success=success)
        for index, success in enumerate(successes)
        for member in range(samples)
    ]
    run_samples.save(folder, f"during_{step:06d}", played, step)
    saver.save_if_best(step)


@pytest.mark.parametrize("later", [{"num_tasks": 20, "samples": 1}, {"num_tasks": 4, "samples": 2}])
def test_only_evaluations_like_the_newest_one_choose_the_best(folder, later):
    """As where a resume has changed `eval.during`: 4 of 4 is no better than 15 of 20."""
    saver, policy, _ = saver_of(folder, metric="eval/success")
    evaluate(folder, saver, policy, 2, [True] * 4)
    resumed, policy, said = saver_of(folder, metric="eval/success")
    resumed.tidy()
    assert (best_of(folder), said) == (2, [])
    num_tasks, samples = later["num_tasks"], later["samples"]
    for step, share in ((4, 0.5), (6, 0.75), (8, 0.25)):
        successes = [index < share * num_tasks for index in range(num_tasks)]
        evaluate(folder, resumed, policy, step, successes, samples=samples)
    assert (kept_in(folder), best_of(folder)) == ([6], 6)
    (text,) = said
    assert text.startswith("1 earlier evaluation between steps had other tasks or samples_per_task")


def test_a_kill_goes_back_to_the_best_of_the_earlier_tasks(folder):
    """The first evaluation of other tasks is after the checkpoint that the run resumes from."""
    saver, policy, _ = saver_of(folder, metric="eval/success")
    evaluate(folder, saver, policy, 2, [True] * 4)
    evaluate(folder, saver, policy, 4, [True, True, False, False])
    saver.save(StageStep("grpo", 4), None)
    evaluate(folder, saver, policy, 6, [True] * 5 + [False] * 5)
    assert (kept_in(folder), best_of(folder)) == ([2, 4, 6], 6)
    rewind(RunFolder.open(folder.path), StageStep("grpo", 4))
    saver, _, _ = saver_of(folder, metric="eval/success")
    saver.tidy()
    assert (kept_in(folder), best_of(folder)) == ([2, 4], 2)


def test_the_best_by_an_evaluation_needs_evaluations():
    best = "trainer.checkpoint.best={metric: eval/success, direction: max}"
    with pytest.raises(ConfigError, match=r"eval\.during\.every"):
        compose(["conf=echo", best])
    assert compose(["conf=echo", best, "eval.during.every=5"])
