"""Train with the policy as its own teacher, as a user would."""

import pytest

from openenv_pipe.runs.metrics import read_metrics
from tests.commands import run

RUN = (
    *("conf=smoke", "device=cpu", "num_threads=1", "env.max_episode_tokens=240"),
    *("trainer.steps=1", "trainer.warm_start.steps=0", "eval.baselines=false", "eval.num_tasks=1"),
    *("trainer.loss.kl.coef=1.0", "trainer.loss.kl.estimator=k2"),
    "trainer.loss.kl.importance_weights=false",
)


@pytest.mark.parametrize(("hint", "least", "most"), [("feedback", 1, 1), ("demonstration", 0, 0.9)])
def test_samples_get_hints_and_a_divergence(tmp_path, hint, least, most):
    """Every reply has an outcome, and not all of a group can be worse than its best."""
    code, _, err = run(tmp_path, "train", *RUN, f"trainer.loss.kl.hint={hint}")
    assert code == 0, err
    (record,) = read_metrics(tmp_path / "runs/smoke/0001/metrics.jsonl")
    assert record["loss/kl"] > 0.0
    assert record["kl/hinted"] > 0.0 and least <= record["kl/hinted"] <= most
