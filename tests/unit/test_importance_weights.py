"""Corrections for a sampler that differs from the old policy. Trap numbers: tests/README.md."""

import math

import pytest
import torch
from fakes import run_config
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.algorithms.losses.importance_weights import (
    is_far_off_policy,
    masked_weights,
    truncated_weights,
)
from openenv_pipe.algorithms.losses.ratios import sample_means

RATIOS = torch.tensor([0.25, 1.0, 4.0, 1.0])  # old policy over sampler
OLD, SAMPLED = RATIOS.log(), torch.zeros(4)
ROWS = torch.tensor([0, 0, 1, 1])  # geometric means 0.5 and 2


def test_truncated_by_hand():
    seen = truncated_weights(OLD - SAMPLED, high=2.0)
    assert seen.weight.tolist() == pytest.approx([0.25, 1.0, 2.0, 1.0])
    assert seen.bounded.tolist() == [False, False, True, False]


def test_masked_by_hand():
    seen = masked_weights(OLD - SAMPLED, low=0.5, high=5.0)
    assert seen.weight.tolist() == pytest.approx([0.0, 1.0, 4.0, 1.0])
    assert seen.bounded.tolist() == [True, False, False, False]


def test_geometric_by_hand():
    seen = truncated_weights(sample_means(OLD - SAMPLED, ROWS), high=1.5)
    assert seen.weight.tolist() == pytest.approx([0.5, 0.5, 1.5, 1.5])
    assert seen.bounded.tolist() == [False, False, True, True]


def test_geometric_masks_by_hand():
    seen = masked_weights(sample_means(OLD - SAMPLED, ROWS), low=0.6, high=2.5)
    assert seen.weight.tolist() == pytest.approx([0.0, 0.0, 2.0, 2.0])
    assert seen.bounded.tolist() == [True, True, False, False]


def test_the_off_policy_mask_leaves_out_what_has_become_unlikely_and_is_pushed_down():
    """Rows have lost log 4 / 2 and gained log 4 / 2 nats a token."""
    logprobs, advantages = OLD, torch.tensor([-1.0, 1.0, -1.0, -1.0])
    lost = math.log(4.0) / 2
    for limit, expected in ((lost - 0.01, True), (lost + 0.01, False)):
        seen = is_far_off_policy(logprobs, SAMPLED, advantages, ROWS, limit=limit)
        assert seen.tolist() == [expected, False, False, False]


def every(old, sampled, rows):
    return [
        truncated_weights(old - sampled, high=2.0),
        masked_weights(old - sampled, low=0.5, high=2.0),
        truncated_weights(sample_means(old - sampled, rows), high=2.0),
        masked_weights(sample_means(old - sampled, rows), low=0.5, high=2.0),
    ]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=300))
def test_weights_are_bounded_whatever_the_difference(differences):
    """Trap 22: a product over a long sample would overflow."""
    old = torch.tensor(differences)
    rows = torch.zeros(len(old), dtype=torch.int64)
    for seen in every(old, torch.zeros(len(old)), rows):
        assert ((seen.weight >= 0) & (seen.weight <= 2.0)).all()


def test_a_sampler_that_agrees_needs_no_correction():
    for seen in every(SAMPLED, SAMPLED, ROWS):
        assert (seen.weight == 1.0).all()
        assert not seen.bounded.any()


def test_truncated_weights_undo_the_bias_where_they_are_not_cut():
    """The weighted mean under the sampler equals the plain mean under the old policy."""
    generator = torch.Generator().manual_seed(0)
    old, sampler = torch.randn(2, 5, generator=generator).log_softmax(dim=-1)
    values = torch.randn(5, generator=generator)
    weights = truncated_weights(old - sampler, high=1e6).weight
    assert torch.allclose((sampler.exp() * weights * values).sum(), (old.exp() * values).sum())


@pytest.mark.parametrize("bounds", [{"low": 1.5, "high": 2.0}, {"low": 0.1, "high": 0.9}])
def test_bounds_that_shut_out_an_agreeing_sampler_are_rejected(bounds):
    with pytest.raises(ValueError, match="set low < 1 < high"):
        run_config({"trainer.loss.correction": {"type": "mask", **bounds}})
