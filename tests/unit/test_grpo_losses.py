"""Losses on tiny numbers, worked out by hand. Trap numbers: tests/README.md."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.grpo.losses import clipped_loss, clipped_share, kl_k3, token_weights

CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
MASK = torch.tensor([[False, True, True, True], [False, False, True, False]])


def weights(loss_type, mask=MASK, num_samples=2, num_tokens=4, max_tokens=10):
    return token_weights(
        mask,
        loss_type=loss_type,
        num_samples=num_samples,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
    ).tolist()


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),  # a mean in each row, then over two rows
        ("dr_grpo", [1 / 20] * 4),  # two rows of ten tokens, however many there are
        ("dapo", [1 / 4] * 4),  # four tokens
    ],
)
def test_weights_of_tokens(loss_type, expected):
    """Trap 12: a row of three trained tokens and one of one."""
    assert weights(loss_type) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", (-2 * 3 / 3 + 4 / 1) / 2),
        ("dr_grpo", (-2 * 3 + 4) / 20),
        ("dapo", (-2 * 3 + 4) / 4),
    ],
)
def test_length_bias_of_each_loss(loss_type, expected):
    """Trap 12. On policy a token's loss is minus its advantage: +2 on the long row, -4 on the
    short one. A mean per row prefers long bad rows and short good ones; the others do not."""
    advantages = torch.tensor([2.0, 2.0, 2.0, -4.0])
    loss, _ = clipped_loss(torch.zeros(4), torch.zeros(4), advantages, **CLIPS)
    assert torch.dot(torch.tensor(weights(loss_type)), loss).item() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(0, 5), st.integers(0, 5))
def test_padding_and_environment_tokens_weigh_nothing(loss_type, before, after):
    """Trap 9: more columns without loss leave every weight as it is."""
    wider = torch.nn.functional.pad(MASK, (before, after))
    assert weights(loss_type, mask=wider) == weights(loss_type)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_rows_of_a_split_weigh_what_they_did_together(loss_type):
    """Trap 10: counts are those of the whole update."""
    rows = [weights(loss_type, mask=MASK[row : row + 1]) for row in (0, 1)]
    assert rows[0] + rows[1] == weights(loss_type)


def test_clipping_by_hand():
    """Trap 12. Ratios 1, 1.5, 0.5, 1.5, 0.5 with clips at 0.8 and 1.3."""
    ratios = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
    advantages = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0])
    loss, seen = clipped_loss(ratios.log(), torch.zeros(5), advantages, **CLIPS)
    assert loss.tolist() == pytest.approx([-2.0, -1.3, -0.5, 1.5, 0.8])
    assert seen.tolist() == pytest.approx(ratios.tolist())
    assert not seen.requires_grad


def test_the_clip_removes_gradients_and_they_are_counted():
    ratios = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
    advantages = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0])
    logprobs = ratios.log().requires_grad_()
    loss, seen = clipped_loss(logprobs, torch.zeros(5), advantages, **CLIPS)
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 0.0, -0.5, 1.5, 0.0])
    num_clipped = clipped_share(seen, advantages, **CLIPS).item()
    assert num_clipped == (logprobs.grad == 0).sum().item() == 2


def test_kl_by_hand():
    """exp(d) - d - 1 with d = reference - policy."""
    values = kl_k3(torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -2.0, -1.0]))
    assert values.tolist() == pytest.approx([0.0, math.exp(-1), math.e - 2])


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=5))
def test_kl_is_never_negative(pairs):
    policy, reference = torch.tensor(pairs).T
    assert (kl_k3(policy, reference) >= -1e-6).all()


def test_kl_estimates_the_divergence():
    """Its mean under the policy is KL(policy || reference), here summed over all outcomes."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 7, generator=generator).log_softmax(dim=-1)
    expected = (policy.exp() * (policy - reference)).sum()
    assert torch.allclose((policy.exp() * kl_k3(policy, reference)).sum(), expected, atol=1e-6)
