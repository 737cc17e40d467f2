"""Policy losses on a few numbers, computed by hand. Trap numbers: tests/README.md."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.algorithms.losses.normalization import Counts, token_weights
from openenv_pipe.algorithms.losses.policy import cispo_loss, grpo_loss, gspo_loss, sapo_loss
from openenv_pipe.algorithms.losses.ratios import sample_means
from openenv_pipe.config.compose import compose

CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
EPISODE_TOKENS = torch.tensor([3.0, 3.0, 3.0, 1.0])  # an episode of three tokens, and of one
NORMALISERS = ["sample", "token", "constant"]
RATIOS = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
ADVANTAGES = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0])


def weights(normaliser, episode_tokens=EPISODE_TOKENS):
    counts = Counts(num_episodes=2, num_tokens=4, num_computed_tokens=4, max_tokens=10)
    return token_weights(episode_tokens, normaliser=normaliser, counts=counts).tolist()


def gradient(loss_of, logprobs):
    """Return the gradient of the summed loss for each token's logprob, and the loss."""
    logprobs = logprobs.clone().requires_grad_()
    policy = loss_of(logprobs)
    policy.loss.sum().backward()
    return logprobs.grad.tolist(), policy


# --- normalisers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normaliser", "expected"),
    [
        ("sample", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),  # the mean of each episode, then over two
        ("constant", [1 / 20] * 4),  # always two episodes of ten tokens, whatever they have
        ("token", [1 / 4] * 4),
    ],
)
def test_weights_of_tokens(normaliser, expected):
    """Trap 12."""
    assert weights(normaliser) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("grpo", ("sample", "all")),
        ("dr_grpo", ("constant", "all")),
        ("dapo", ("token", "with_signal")),  # which replaces groups without a signal
        ("gspo", ("sample", "all")),
        ("cispo", ("token", "all")),
        ("rloo", ("constant", "all")),
        ("reinforce_pp", ("token", "all")),
        ("sapo", ("sample", "all")),
        ("maxrl", ("constant", "all")),
        ("gdpo", ("sample", "all")),
    ],
)
def test_presets_have_the_means_of_their_papers(preset, expected):
    loss = compose(["conf=smoke", f"trainer={preset}"]).config.trainer.loss
    assert (loss.normalise, loss.normalise_groups) == expected


@pytest.mark.parametrize(
    ("normaliser", "expected"),
    [
        ("sample", (-2 * 3 / 3 + 4 / 1) / 2),
        ("constant", (-2 * 3 + 4) / 20),
        ("token", (-2 * 3 + 4) / 4),
    ],
)
def test_length_bias_of_each_normaliser(normaliser, expected):
    """Trap 12: a mean per episode prefers long bad ones and short good ones; others do not.

    On policy a token's loss is minus its advantage: +2 in the long episode, -4 in the short one.
    """
    advantages = torch.tensor([2.0, 2.0, 2.0, -4.0])
    policy = grpo_loss(torch.zeros(4), torch.zeros(4), advantages, **CLIPS)
    seen = torch.dot(torch.tensor(weights(normaliser)), policy.loss).item()
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_tokens_of_a_split_weigh_what_they_did_together(normaliser):
    """Trap 10: counts are of the whole update, and the order of tokens does not matter."""
    together = weights(normaliser)
    apart = [weights(normaliser, EPISODE_TOKENS[part]) for part in (slice(2), slice(2, 4))]
    assert apart[0] + apart[1] == together
    assert weights(normaliser, EPISODE_TOKENS.flip(0)) == together[::-1]


def test_means_of_samples_stand_at_their_tokens():
    values, rows = torch.tensor([1.0, 5.0, 3.0, 7.0]), torch.tensor([0, 2, 0, 2])
    assert sample_means(values, rows).tolist() == [2.0, 6.0, 2.0, 6.0]
    assert sample_means(values[:0], rows[:0]).tolist() == []


# --- grpo ---------------------------------------------------------------------------------------


def test_clipping_by_hand():
    """Trap 12. Ratios 1, 1.5, 0.5, 1.5, 0.5 with clips at 0.8 and 1.3."""
    gradients, policy = gradient(
        lambda logprobs: grpo_loss(logprobs, torch.zeros(5), ADVANTAGES, **CLIPS), RATIOS.log()
    )
    assert policy.loss.tolist() == pytest.approx([-2.0, -1.3, -0.5, 1.5, 0.8])
    assert gradients == pytest.approx([-2.0, 0.0, -0.5, 1.5, 0.0])
    assert policy.ratio.tolist() == pytest.approx(RATIOS.tolist())
    assert not policy.ratio.requires_grad
    assert policy.clipped_high.tolist() == [False, True, False, False, False]
    assert policy.clipped_low.tolist() == [False, False, False, False, True]


# --- cispo --------------------------------------------------------------------------------------


def test_cispo_by_hand():
    """REINFORCE with weights 1, 1.3, 0.8, 1.3, 0.8: every token keeps a bounded gradient."""
    gradients, policy = gradient(
        lambda logprobs: cispo_loss(logprobs, torch.zeros(5), ADVANTAGES, **CLIPS), RATIOS.log()
    )
    assert gradients == pytest.approx([-2.0, -1.3, -0.8, 1.3, 0.8])
    expected = -torch.tensor([1.0, 1.3, 0.8, 1.3, 0.8]) * ADVANTAGES * RATIOS.log()
    assert policy.loss.tolist() == pytest.approx(expected.tolist())
    assert policy.clipped_high.tolist() == [False, True, False, True, False]
    assert policy.clipped_low.tolist() == [False, False, True, False, True]


def test_cispo_without_a_lower_bound():
    gradients, policy = gradient(
        lambda logprobs: cispo_loss(
            logprobs, torch.zeros(2), torch.ones(2), clip_low=1.0, clip_high=4.0
        ),
        torch.tensor([0.01, 9.0]).log(),
    )
    assert gradients == pytest.approx([-0.01, -5.0])
    assert not policy.clipped_low.any()


# --- sapo ---------------------------------------------------------------------------------------


def test_sapo_is_the_papers_gate():
    """Equations 5 and 6 of arXiv:2511.20347, with math alone: the weight of a token's gradient is
    4 p (1 - p) times its ratio, where p = sigmoid(tau (ratio - 1))."""
    taus = {1.0: 0.5, -1.0: 2.0}
    gradients, policy = gradient(
        lambda logprobs: sapo_loss(
            logprobs, torch.zeros(5), ADVANTAGES, tau_positive=0.5, tau_negative=2.0
        ),
        RATIOS.log(),
    )
    for number, (ratio, advantage) in enumerate(
        zip(RATIOS.tolist(), ADVANTAGES.tolist(), strict=True)
    ):
        tau = taus[math.copysign(1.0, advantage)]
        p = 1.0 / (1.0 + math.exp(-tau * (ratio - 1.0)))
        assert policy.loss[number].item() == pytest.approx(-4.0 / tau * p * advantage)
        assert gradients[number] == pytest.approx(-4.0 * p * (1.0 - p) * ratio * advantage)
    assert not policy.clipped_low.any() and not policy.clipped_high.any()


# --- gspo ---------------------------------------------------------------------------------------

GSPO_ROWS = torch.tensor([0, 0, 1, 1])
GSPO_RATIOS = torch.tensor([4.0, 1.0, 1.1, 1.1])  # geometric means 2 and 1.1


def gspo(logprobs, advantages, **clips):
    return gspo_loss(logprobs, torch.zeros(4), torch.tensor(advantages), GSPO_ROWS, **clips)


def test_gspo_by_hand():
    """Trap 22: a sample's ratio is the geometric mean of its tokens' ratios."""
    gradients, policy = gradient(
        lambda logprobs: gspo(logprobs, [1.0, 1.0, -3.0, -3.0], **CLIPS), GSPO_RATIOS.log()
    )
    assert policy.ratio.tolist() == pytest.approx([2.0, 2.0, 1.1, 1.1])
    assert policy.loss.tolist() == pytest.approx([-1.3, -1.3, 3.3, 3.3])
    assert gradients == pytest.approx([0.0, 0.0, 3.3, 3.3])  # the whole first sample is clipped
    assert policy.clipped_high.tolist() == [True, True, False, False]


def test_gspo_of_one_advantage_a_sample_is_the_papers_objective():
    """The mean over a sample's tokens has the value and gradient of s * A, with s the mean
    ratio."""
    logprobs = GSPO_RATIOS.log().requires_grad_()
    (
        torch.exp(sample_means(logprobs, GSPO_ROWS)) * torch.tensor([2.0, 2.0, -1.0, -1.0]) / 2
    ).sum().backward()
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    gradients, _ = gradient(
        lambda each: gspo(each, [2.0, 2.0, -1.0, -1.0], **wide), GSPO_RATIOS.log()
    )
    assert [-each / 2 for each in gradients] == pytest.approx(logprobs.grad.tolist())


def test_gspo_credits_each_token_with_its_own_advantage():
    """Turns of one episode may have different advantages: GSPO-token, section 4.3 of the paper."""
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    gradients, _ = gradient(
        lambda each: gspo(each, [1.0, 0.0, 1.0, -1.0], **wide), GSPO_RATIOS.log()
    )
    assert gradients == pytest.approx([-2.0, 0.0, -1.1, 1.1])


# --- properties of all losses --------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    gaps=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=300),
    sign=st.sampled_from([-1.0, 1.0]),
)
def test_extreme_ratios_stay_finite(gaps, sign):
    """Trap 22: also for samples of hundreds of tokens whose ratios are all extreme in one
    direction."""
    old = torch.zeros(len(gaps))
    rows = torch.zeros(len(gaps), dtype=torch.int64)
    advantages = torch.full((len(gaps),), sign)
    for loss_of in (
        lambda logprobs: grpo_loss(logprobs, old, advantages, **CLIPS),
        lambda logprobs: gspo_loss(logprobs, old, advantages, rows, **CLIPS),
        lambda logprobs: cispo_loss(logprobs, old, advantages, **CLIPS),
        lambda logprobs: sapo_loss(logprobs, old, advantages, tau_positive=1.0, tau_negative=2.0),
    ):
        gradients, policy = gradient(loss_of, torch.tensor(gaps))
        assert all(map(math.isfinite, gradients))
        assert torch.isfinite(policy.loss).all()
        assert torch.isfinite(policy.ratio).all()
