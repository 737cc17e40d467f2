"""Which checkpoints a run keeps, judged by its own metrics."""

from contextlib import closing
from random import Random
from types import SimpleNamespace

import pytest
import run_samples
from fakes import run_config, tiny_policy

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.pipeline.checkpoints import Saver
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.runs.evals import save_evaluation
from openenv_pipe.runs.metrics import MetricsFile
from openenv_pipe.types import Status

SOURCE = SimpleNamespace(save=lambda folder: None)


@pytest.fixture
def folder(tmp_path):
    return run_samples.create(tmp_path)


def run(folder, values, *, metric="reward/mean", direction="max", keep_last=1):
    """Save a checkpoint after each step with these metric values; return the steps kept and the
    notes."""
    best = {"metric": metric, "direction": direction}
    keep = {"every": 1, "every_minutes": None, "num_resumable": 1}
    keep |= {"keep_last": keep_last, "best": best}
    said = []
    config = run_config({"trainer.checkpoint": keep, "eval.during.every": 1})
    saver = Saver(config, folder, tiny_policy(), SOURCE, said.append)
    with closing(MetricsFile(folder.metrics_path)) as metrics:
        for step, value in enumerate(values, start=1):
            measured = {} if value is None else {"reward/mean": value}
            metrics.append({"stage": "grpo", "step": step, **measured})
            saver.save(StageStep("grpo", step), None)
    return [StageStep.of(path).step for path in folder.checkpoints()], said


def best_of(folder):
    return int((folder.path / "checkpoints" / "best").readlink().name.removeprefix("step_"))


@pytest.mark.parametrize(
    ("direction", "values", "best", "kept"),
    [
        ("max", [0.1, 0.9, 0.4, 0.9, 0.2], 2, [2, 5]),
        ("min", [0.4, 0.3, 0.5, 0.6], 2, [2, 4]),
        ("max", [0.1, 0.2, 0.3], 3, [3]),
        ("max", [0.0, -1.0, -2.0], 1, [1, 3]),
    ],
)
def test_the_best_by_a_metric_stays_beside_the_last(folder, direction, values, best, kept):
    assert run(folder, values, direction=direction) == (kept, [])
    assert best_of(folder) == best


def test_a_step_without_the_metric_keeps_its_checkpoint(folder):
    kept, said = run(folder, [0.3, None, 0.1, 0.2])
    assert kept == [1, 2, 4]
    assert best_of(folder) == 1
    assert len(said) == 1 and "step_000002" in said[0]


def test_a_wrong_name_deletes_nothing_and_is_said_once(folder):
    kept, said = run(folder, [0.1, 0.2, 0.3], metric="reward/men")
    assert kept == [1, 2, 3]
    (text,) = said
    assert "did you mean reward/mean" in text
    assert not (folder.path / "checkpoints" / "best").exists()


def test_an_evaluation_of_few_scored_tasks_names_no_best_checkpoint(folder):
    for step, num_scored in ((1, 10), (2, 1)):
        played = [run_samples.episode(Random(0), i, 0, success=step == 2) for i in range(10)]
        for each in played[num_scored:]:
            each.status = Status.ERROR
        save_evaluation(
            folder.path, run_samples.evaluation(folder, f"during_00000{step}", played, step)
        )
    kept, _ = run(folder, [0.1, 0.2, 0.3], metric="eval/success")
    assert best_of(folder) == 1
    assert kept == [1, 2, 3], "what was not measured is not deleted"


def test_the_best_by_an_evaluation_needs_evaluations():
    best = "trainer.checkpoint.best={metric: eval/success, direction: max}"
    with pytest.raises(ConfigError, match=r"eval\.during\.every"):
        compose(["conf=echo", best])
    assert compose(["conf=echo", best, "eval.during.every=5"])
