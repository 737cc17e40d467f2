"""Estimators of the KL divergence, and their gradients. Trap numbers: tests/README.md."""

import math

import pytest
import torch
from fakes import run_config
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.algorithms.losses.kl import kl_estimate, kl_loss
from openenv_pipe.algorithms.losses.ratios import ratios

ESTIMATORS = ["k1", "k2", "k3"]
LOGITS = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
POLICY, SAMPLER, REFERENCE = LOGITS.log_softmax(dim=-1)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.0, -1.0, 2.0]),
        ("k2", [0.0, 0.5, 2.0]),
        ("k3", [0.0, math.e - 2, math.exp(-2) + 1]),
    ],
)
def test_estimators_by_hand(estimator, expected):
    values = kl_estimate(
        torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.0, -1.0, -3.0]), estimator
    )
    assert values.tolist() == pytest.approx(expected)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0)), min_size=1, max_size=5))
def test_k3_is_never_negative_and_all_are_finite(pairs):
    policy, reference = torch.tensor(pairs, dtype=torch.float32).T
    assert (kl_estimate(policy, reference, "k3") >= -1e-6).all()
    for estimator in ESTIMATORS:
        assert torch.isfinite(kl_estimate(policy, reference, estimator)).all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_means_under_the_policy_are_the_divergence(estimator):
    """The mean of the estimates over all outcomes equals the divergence."""
    expected = (POLICY.exp() * (POLICY - REFERENCE)).sum()
    seen = (POLICY.exp() * kl_estimate(POLICY, REFERENCE, estimator)).sum()
    assert torch.allclose(seen, expected)


def divergence_gradient():
    """Return the exact gradient by autograd through the sum over all outcomes."""
    logits = LOGITS[0].clone().requires_grad_()
    policy = logits.log_softmax(dim=-1)
    (policy.exp() * (policy - REFERENCE)).sum().backward()
    return logits.grad


def mean_gradient(estimator, *, importance_weights, sampler=SAMPLER):
    """Return the expected gradient of the token loss when the sampler draws the tokens.

    Each outcome counts with the sampler's probability, as for infinitely many tokens.
    """
    logits = LOGITS[0].clone().requires_grad_()
    policy = logits.log_softmax(dim=-1)
    loss = kl_estimate(policy, REFERENCE, estimator)
    if importance_weights:
        loss = kl_loss(loss, ratios(policy - sampler), estimator)
    (sampler.exp() * loss).sum().backward()
    return logits.grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("sampler", [SAMPLER, POLICY], ids=["off policy", "on policy"])
def test_with_importance_weights_the_gradient_is_the_divergences(estimator, sampler):
    """Trap 23."""
    seen = mean_gradient(estimator, importance_weights=True, sampler=sampler)
    assert torch.allclose(seen, divergence_gradient(), atol=1e-12)


def test_without_them_it_is_another_one():
    """Trap 23: k1's gradient is zero even on policy, k3's is wrong, and k2's is right only on
    policy."""
    expected = divergence_gradient()
    k1 = mean_gradient("k1", importance_weights=False, sampler=POLICY)
    assert torch.allclose(k1, torch.zeros_like(k1), atol=1e-12)
    k2 = mean_gradient("k2", importance_weights=False, sampler=POLICY)
    assert torch.allclose(k2, expected)
    for estimator in ESTIMATORS:
        seen = mean_gradient(estimator, importance_weights=False)
        assert not torch.allclose(seen, expected, atol=1e-2)


def test_drawn_tokens_come_to_the_same_gradient():
    """Trap 23: drawn tokens give the exact gradient within their statistical noise."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.multinomial(SAMPLER.exp(), 200_000, replacement=True, generator=generator)
    for estimator in ESTIMATORS:
        logits = LOGITS[0].clone().requires_grad_()
        policy = logits.log_softmax(dim=-1)
        estimate = kl_estimate(policy[drawn], REFERENCE[drawn], estimator)
        kl_loss(estimate, ratios(policy[drawn] - SAMPLER[drawn]), estimator).mean().backward()
        assert torch.allclose(logits.grad, divergence_gradient(), atol=0.02)


def test_k1_without_importance_weights_is_rejected():
    with pytest.raises(ValueError, match="its gradient is zero on average"):
        run_config(
            {
                "trainer.loss.kl": {
                    "coef": 0.1,
                    "reference": None,
                    "estimator": "k1",
                    "importance_weights": False,
                    "refresh_every": None,
                    "hint": None,
                }
            }
        )


def test_k2_pulls_hardest_at_what_the_reference_likes_least():
    """A teacher may be far more certain than a policy's own start: the clamp of log ratios would
    leave such tokens without a gradient."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-3.0, -60.0]), "k2").sum().backward()
    assert logprobs.grad.tolist() == [2.0, 59.0]
    assert torch.isfinite(kl_estimate(logprobs, torch.tensor([-3.0, -torch.inf]), "k2")).all()
