"""What a model card says of the evaluations of its checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest
import run_samples
import yaml

from openenv_pipe.config.compose import compose
from openenv_pipe.extras.export.model_card import model_card
from openenv_pipe.extras.report.sections import model_rows
from openenv_pipe.runs.evals import save_evaluation


@pytest.mark.parametrize(("evaluated", "is_missing"), [((), True), ((2,), True), ((2, 5), False)])
def test_a_card_says_that_its_checkpoint_was_not_evaluated(tmp_path, evaluated, is_missing):
    folder = run_samples.create(tmp_path)
    if evaluated:
        run_samples.evaluate(folder, "start", 0.2)
    for step in evaluated:
        run_samples.evaluate(folder, f"during_{step:06d}", 0.5, step=step)
    card = model_card(folder, "step_000005", Path("it"), step=5)
    assert ("| at the start (`start`) |" in card) is bool(evaluated)
    assert "during_000002" not in card and ("during_000005" in card) is not is_missing
    command = "This checkpoint was not evaluated. To evaluate it: `openenv-pipe eval "
    assert (f"{command}smoke/0001@step_000005`" in card) is is_missing


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_the_card_of_the_start_claims_no_training(tmp_path, is_evaluated):
    folder = run_samples.create(tmp_path)
    if is_evaluated:
        run_samples.evaluate(folder, "start", 0.2)
    card = model_card(folder, "start", Path("it"), step=0)
    assert "The model, before training, of a run" in card and "| training |" not in card
    assert "reinforcement-learning" not in card
    missing = "This checkpoint was not evaluated. To evaluate it: `openenv-pipe eval "
    assert (f"{missing}smoke/0001@start`" in card) is not is_evaluated


@pytest.mark.parametrize(
    ("checkpoint", "own"),
    [
        ("start", ["untrained", "untrained_program"]),
        ("warm_start_000003", ["warm_start_000003"]),
        ("step_000000", ["warm_start", "step_000000"]),
    ],
)
def test_a_card_at_step_0_lists_the_evaluations_of_its_own_weights(tmp_path, checkpoint, own):
    """The start, the warm start and its end are all at step 0 of GRPO."""
    folder = run_samples.create(tmp_path)
    labels = ["untrained", "untrained_program", "warm_start", "warm_start_000003", "step_000000"]
    for label in ["start", "start_greedy", *labels]:
        run_samples.evaluate(folder, label, 0.2)
    card = model_card(folder, checkpoint, Path("it"), step=0)
    assert [label for label in labels if f"\n| {label} |" in card] == sorted(own, key=labels.index)
    assert "| at the start (`start`) |" in card and "| at the start (`start_greedy`) |" in card


@pytest.mark.parametrize(
    ("checkpoint", "step", "training", "tags"),
    [
        ("warm_start_000003", 0, "supervised, 3 steps on episodes of ", ["sft"]),
        ("step_000000", 0, "supervised, 9 steps on episodes of ", ["sft"]),
        ("step_000005", 5, "after 9 supervised steps on ", ["reinforcement-learning", "grpo"]),
    ],
)
def test_a_card_says_which_steps_have_trained_its_weights(
    tmp_path, checkpoint, step, training, tags
):
    words = ["conf=smoke", f"runs_dir={tmp_path}", "trainer.warm_start.steps=9"]
    folder = run_samples.create(tmp_path, compose(words).config)
    card = model_card(folder, checkpoint, Path("it"), step=step)
    assert training in card and ("group size" in card) is (step > 0)
    _, front, _ = card.split("---\n", 2)
    assert yaml.safe_load(front)["tags"] == ["openenv", "openenv-pipe", *tags]
    assert ("Trained with supervision for an [OpenEnv]" in card) is (step == 0)


def test_a_card_warns_of_what_was_measured_otherwise_than_in_the_run(tmp_path):
    folder = run_samples.create(tmp_path)
    made = run_samples.evaluation(folder, "step_000005", run_samples.eval_episodes(), 5)
    changed = {"measured_with": {"env.success_reward": "0.5, not 1.0"}, "confidence": 0.8}
    save_evaluation(folder.path, replace(made, report=made.report.model_copy(update=changed)))
    card = model_card(folder, "step_000005", Path("it"), step=5)
    warning = "**Warning:** step_000005: measured with other settings or code than the run's own"
    assert warning in card and "0.5, not 1.0" in card
    assert "with 95% intervals (80% for step_000005)" in card


def test_card_and_report_say_which_weights_stood_for_the_hubs(tmp_path):
    config = compose(["conf=echo", "model=smollm2_135m", f"runs_dir={tmp_path}"]).config
    folder = run_samples.create(tmp_path, config)
    for about in (None, "a package, quantized"):
        folder.update(weights_from=about)
        shown = model_card(folder, "step_000005", Path("it"), step=5)
        shown += model_rows(config, folder.record.facts)["model"]
        assert shown.count("a package, quantized") == (2 if about else 0)
