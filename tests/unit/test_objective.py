"""The objective of an update and its metrics. Trap numbers: tests/README.md."""

import asyncio
import dataclasses
import math

import pytest
import torch
from fakes import (
    all_episodes,
    collect,
    kl_term,
    plain_sample,
    run_config,
    tiny_policy,
    trainer_config,
)

from openenv_pipe.algorithms.losses.normalization import Counts
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.accumulator import MetricAccumulator
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.metrics import step_metrics
from openenv_pipe.learner.objective import Objective, Tokens

ROWS = torch.tensor([0, 0, 1, 1])
COUNTS = Counts(num_episodes=2, num_tokens=4, num_computed_tokens=4, max_tokens=8)
SAMPLED = torch.tensor([-1.0, -2.0, -1.0, -2.0])
START = torch.tensor([-1.1, -1.5, -1.0, -4.0])  # importance weights 0.9, 1.65, 1, 0.135
NOW = torch.tensor([-1.2, -1.4, -0.9, -4.1])
REFERENCE = torch.tensor([-1.0, -1.4, -2.0, -3.0])
ENTROPY = torch.tensor([0.5, 1.0, 1.5, 2.0])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0])
EVERYTHING = {
    "kl": kl_term(0.3, estimator="k2", importance_weights=True),
    "entropy_coef": 0.2,
    "correction": {"type": "truncate", "low": 0.5, "high": 1.5},
}


def objective(**changes):
    return Objective(trainer_config({f"loss.{key}": changes[key] for key in changes}).loss)


def tokens(chosen=slice(None)):
    return Tokens(
        logprobs=NOW.clone().requires_grad_()[chosen],
        entropy=ENTROPY.clone().requires_grad_()[chosen],
        sampled_logprobs=SAMPLED[chosen],
        start_logprobs=START[chosen],
        reference_logprobs=REFERENCE[chosen],
        advantages=ADVANTAGES[chosen],
        sample_index=ROWS[chosen] - ROWS[chosen][0],
        episode_tokens=torch.full((4,), 2.0)[chosen],
    )


def test_all_parts_are_summed_by_hand():
    """the ratio is of now to start, the weight of start to sampler; each token counts 1/4"""
    accumulator = MetricAccumulator()
    loss = objective(normalise="token", **EVERYTHING).loss(tokens(), COUNTS, accumulator)
    ratio, weight = torch.exp(NOW - START), torch.exp(START - SAMPLED).clamp(max=1.5)
    policy = (-ratio * weight * ADVANTAGES).mean()  # no ratio is clipped
    kl = (0.5 * (NOW - REFERENCE).square() * ratio * weight).mean()
    assert loss.item() == pytest.approx((policy + 0.3 * kl - 0.2 * ENTROPY.mean()).item())
    metrics = step_metrics(accumulator, [1.0], lr=0.5)
    assert metrics["loss/total"] == pytest.approx(loss.item())
    assert metrics["loss/policy"] == pytest.approx(policy.item())
    assert metrics["loss/kl"] == pytest.approx((0.5 * (NOW - REFERENCE).square()).mean().item())
    assert metrics["loss/entropy"] == pytest.approx(1.25)


@pytest.mark.parametrize("num_uncomputed", [0, 12])
def test_the_routers_balance_counts_in_full_whatever_the_share_of_groups_with_a_signal(
    num_uncomputed,
):
    counts = dataclasses.replace(COUNTS, num_tokens=4 + num_uncomputed)
    found = dataclasses.replace(tokens(), router_balance=torch.tensor(2.0))
    loss = objective(router_aux_coef=0.5, policy_coef=0.0).loss(found, counts, MetricAccumulator())
    assert loss.item() == pytest.approx(1.0)


def test_the_entropy_bonus_is_the_mean_over_tokens_whatever_the_normaliser():
    for normalise in ("sample", "token", "constant"):
        given = tokens()
        given.entropy.retain_grad()
        loss = objective(normalise=normalise, entropy_coef=0.2).loss(
            given, COUNTS, MetricAccumulator()
        )
        loss.backward()
        assert given.entropy.grad.tolist() == pytest.approx([-0.05] * 4)


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", ["none", "truncate", "mask", "geometric"])
def test_batches_add_up_to_the_whole(kind, correction):
    """Trap 10: this holds for the loss and the metrics."""
    changes = EVERYTHING | {
        "type": kind,
        "correction": EVERYTHING["correction"] | {"type": correction},
    }
    whole, parts = objective(**changes), 0.0
    of_whole, of_parts = MetricAccumulator(), MetricAccumulator()
    expected = whole.loss(tokens(), COUNTS, of_whole).item()
    for chosen in (slice(0, 2), slice(2, 4)):
        parts += whole.loss(tokens(chosen), COUNTS, of_parts).item()
    assert parts == pytest.approx(expected)
    once, twice = (step_metrics(accumulator, [1.0], lr=0.5) for accumulator in (of_whole, of_parts))
    assert twice == pytest.approx(once)


def test_metrics_by_hand():
    accumulator = MetricAccumulator()
    correction = {"type": "mask", "low": 0.5, "high": 1.5}
    objective(correction=correction, clip_high=0.1).loss(tokens(), COUNTS, accumulator)
    metrics = step_metrics(accumulator, [1.0, 3.0], lr=0.5)
    weights = torch.exp(START - SAMPLED)
    ratio = torch.exp(NOW - START)  # 0.90, 1.11, 1.11, 0.90
    assert metrics["clip/high"] == 0.25  # only the second: the third has a negative advantage
    assert metrics["clip/low"] == 0.0
    assert metrics["clip/share"] == 0.25
    assert metrics["ratio/max"] == pytest.approx(ratio.max().item())
    assert metrics["ratio/min"] == pytest.approx(ratio.min().item())
    assert metrics["advantage/mean"] == 0.0
    assert metrics["advantage/std"] == 1.0
    assert metrics["advantage/min"] == -1.0
    assert metrics["advantage/max"] == 1.0
    assert metrics["correction/mean"] == pytest.approx((weights[0] + weights[2]).item() / 4)
    assert metrics["correction/bounded"] == 0.5
    assert metrics["mismatch/mean"] == pytest.approx((START - SAMPLED).abs().mean().item())
    assert metrics["mismatch/max"] == 2.0
    assert metrics["mismatch/kl"] == pytest.approx((SAMPLED - START).mean().item())
    effective = weights.sum() ** 2 / (4 * weights.square().sum())
    assert metrics["mismatch/effective_share"] == pytest.approx(effective.item())
    assert metrics["grad/norm"] == 3.0


def test_without_a_correction_the_sampler_stands_for_the_old_policy():
    """Tokens without start logprobs do not enter the mismatch metrics."""
    accumulator = MetricAccumulator()
    objective(normalise="token").loss(tokens(), COUNTS, accumulator)
    unknown = dataclasses.replace(tokens(), start_logprobs=None)
    objective(normalise="token").loss(unknown, COUNTS, accumulator)
    metrics = step_metrics(accumulator, [1.0], lr=0.5)
    assert metrics["ratio/max"] == pytest.approx(torch.exp(NOW - SAMPLED).max().item())
    assert metrics["mismatch/mean"] == pytest.approx((START - SAMPLED).abs().mean().item())
    assert "correction/mean" not in metrics


@pytest.mark.parametrize("kind", ["truncate", "mask", "geometric"])
async def test_a_correction_takes_the_ratio_to_where_the_step_began(kind):
    """Tokens of later updates need no correction either, because the policy itself sampled them.

    The ratio still shows how far the updates have moved the policy.
    """
    policy = tiny_policy(ends=True)
    groups = await collect(policy, num_tasks=3)
    samples = [plain_sample(episode) for episode in all_episodes(groups)]
    changes = {
        "updates_per_step": 3,
        "tokens_per_batch": 60,
        "optimizer.lr": 1e-2,
        "loss.correction": {"type": kind, "low": 0.5, "high": 2.0},
    }
    learner = Learner(policy, trainer_config(changes), max_episode_tokens=120, seed=0)
    metrics = learner.update(samples, step=1)
    assert metrics["mismatch/max"] < 1e-5
    assert metrics["mismatch/effective_share"] == pytest.approx(1.0)
    assert metrics["correction/mean"] == pytest.approx(1.0)
    assert metrics["correction/bounded"] == 0.0
    assert metrics["ratio/max"] > 1.01


def reinforce(tokens, *, scale):
    """A custom loss that also asserts the values it is given."""
    assert tokens.sample_index.tolist() == [0, 0, 1, 1]
    assert torch.equal(tokens.old_logprobs, SAMPLED)
    return -scale * tokens.advantages * tokens.logprobs


def unclipped(tokens):
    return -(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages


def of_another_shape(tokens):
    return (tokens.advantages * tokens.logprobs).sum()


def without_a_gradient(tokens):
    return tokens.advantages * tokens.logprobs.detach()


def not_a_tensor(tokens):
    return 0.0


def not_finite(tokens):
    return tokens.logprobs * math.inf


def complex_numbers(tokens):
    return tokens.logprobs * 1j


def raises_cancelled(tokens):
    raise asyncio.CancelledError


def exits(tokens):
    raise SystemExit(0)


def spoils(tokens):
    """Change every tensor that it is given."""
    loss = -tokens.advantages * tokens.logprobs
    with torch.no_grad():
        tokens.logprobs.zero_()
    for tensor in (tokens.old_logprobs, tokens.advantages, tokens.sample_index):
        tensor.zero_()
    return loss.clone()


def own_objective(name, options=None, **changes):
    loss = run_config().trainer.loss.model_dump() | changes
    del loss["clip_low"], loss["clip_high"], loss["max_ratio"]
    loss |= {"type": "python", "target": f"{__name__}:{name}", "options": options or {}}
    return Objective(run_config({"trainer.loss": loss}).trainer.loss)


def test_a_loss_of_ones_own_is_weighted_like_any_other():
    accumulator = MetricAccumulator()
    objective = own_objective("reinforce", {"scale": 2.0}, normalise="token", entropy_coef=0.2)
    given = tokens()
    loss = objective.loss(given, COUNTS, accumulator)
    assert loss.item() == pytest.approx((-2.0 * ADVANTAGES * NOW).mean() - 0.2 * ENTROPY.mean())
    assert step_metrics(accumulator, [1.0], lr=0.5)["clip/share"] == 0.0
    (gradient,) = torch.autograd.grad(loss, given.logprobs)
    assert torch.allclose(gradient, -2.0 * ADVANTAGES / 4)


def test_a_loss_of_ones_own_is_corrected_as_the_built_in_ones():
    """The ratio is to the trainer's logprobs at the step's start, the correction to the
    sampler's."""
    own = own_objective("unclipped", **EVERYTHING).loss(tokens(), COUNTS, MetricAccumulator())
    wide = objective(clip_low=0.99, clip_high=1e9, **EVERYTHING)
    assert own.item() == pytest.approx(wide.loss(tokens(), COUNTS, MetricAccumulator()).item())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("of_another_shape", r"the shape \[\]; expected a tensor of shape \[4\]"),
        ("without_a_gradient", "without a gradient"),
        ("not_a_tensor", "a float; expected a tensor"),
        ("not_finite", "returned -inf for token 0 of 4, whose logprob is"),
        ("complex_numbers", r"numbers of type torch\.complex64"),
        ("raises_cancelled", "raised CancelledError, although nothing cancelled it"),
        ("exits", "raised SystemExit: 0"),
    ],
)
def test_what_is_no_loss_is_rejected(name, words):
    with pytest.raises(ConfigError, match=rf"trainer\.loss\.target='{__name__}:{name}' .*{words}"):
        own_objective(name).loss(tokens(), COUNTS, MetricAccumulator())


def test_a_loss_of_ones_own_changes_no_tensor():
    given, untouched = tokens(), tokens()
    own_objective("spoils").loss(given, COUNTS, MetricAccumulator())
    for name in ("logprobs", "sampled_logprobs", "advantages", "sample_index"):
        assert torch.equal(getattr(given, name), getattr(untouched, name))


def test_options_that_a_loss_does_not_take_are_rejected_before_the_run():
    with pytest.raises(ConfigError, match="cannot be called with 1 argument and the options"):
        own_objective("reinforce", {"size": 1})


def test_the_loss_group_chooses_a_loss_of_ones_own():
    config = compose(["conf=echo", "trainer/loss=python", "trainer.loss.target=my:loss"]).config
    assert (config.trainer.loss.title, config.trainer.loss.normalise) == ("my:loss", "sample")
