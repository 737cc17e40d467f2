"""Policy losses per token. Each takes current and old logprobs and advantages, [N].

Shape letter: N trained tokens of a batch. Losses are to be minimised.
"""

import math
from typing import NamedTuple

import torch

from openenv_pipe.algorithms.losses.ratios import ratios, sample_means


class PolicyLoss(NamedTuple):
    """A policy loss and its metrics: all [N]; only the loss has a gradient."""

    loss: torch.Tensor
    ratio: torch.Tensor  # current over old: the token's, or in GSPO its sample's
    clipped_low: torch.Tensor  # bool: the lower clip has changed this token's gradient
    clipped_high: torch.Tensor


def grpo_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float | None = None,
) -> PolicyLoss:
    """PPO's clipped objective per token (Schulman et al. 2017, arXiv:1707.06347), as in GRPO
    (arXiv:2402.03300). `clip_high` above `clip_low` is DAPO's clip-higher (arXiv:2503.14476).

    max_ratio: an upper bound of ratios with negative advantages, which have no other
        (INTELLECT-2, arXiv:2505.07291)
    """
    ratio_N = ratios(logprobs_N - old_logprobs_N)
    return _clipped(ratio_N, advantages_N, clip_low, clip_high, max_ratio)


def gspo_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sample_index_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float | None = None,
) -> PolicyLoss:
    """Clip one ratio per sample: the geometric mean of its tokens' (Zheng et al. 2025,
    arXiv:2507.18071). Clips are far smaller than those of tokens, about 3e-4.

    This is GSPO-token of the paper's section 4.3: the ratio's value is the sample's, its gradient
    the token's own. With one advantage per sample it equals GSPO; advantages per turn need it.
    """
    mean_N = sample_means((logprobs_N - old_logprobs_N).detach(), sample_index_N)
    ratio_N = ratios(mean_N) * torch.exp(logprobs_N - logprobs_N.detach())
    return _clipped(ratio_N, advantages_N, clip_low, clip_high, max_ratio)


def cispo_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Weight REINFORCE by the ratio, clipped and without a gradient (MiniMax-M1,
    arXiv:2506.13585): where PPO drops a token, this only bounds its weight.

    With `clip_low` of at least 1, as in the paper, there is no lower bound.
    """
    ratio_N = ratios(logprobs_N.detach() - old_logprobs_N)
    weight_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(
        loss=-weight_N * advantages_N * logprobs_N,
        ratio=ratio_N,
        clipped_low=ratio_N < 1.0 - clip_low,
        clipped_high=ratio_N > 1.0 + clip_high,
    )


def sapo_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> PolicyLoss:
    """A smooth gate in place of the clip (SAPO, Gao et al. 2025, arXiv:2511.20347).

    The slope of the gate 4 / tau sigmoid(tau (ratio - 1)) is 1 at a ratio of 1, as without a clip,
    and falls on both sides, the faster the larger tau. tau_negative: for advantages of at most 0.
    """
    ratio_N = ratios(logprobs_N - old_logprobs_N)
    tau_N = torch.full_like(ratio_N, tau_negative).masked_fill(advantages_N > 0, tau_positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1.0)) * 4.0 / tau_N
    never_N = torch.zeros_like(advantages_N, dtype=torch.bool)
    return PolicyLoss(-gate_N * advantages_N, ratio_N.detach(), never_N, never_N)


def _clipped(
    ratio_N: torch.Tensor,
    advantages_N: torch.Tensor,
    clip_low: float,
    clip_high: float,
    max_ratio: float | None,
) -> PolicyLoss:
    """Clip a ratio only if it has moved too far in the direction of its advantage."""
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    seen_N = ratio_N.detach()
    largest = math.inf if max_ratio is None else max_ratio
    ratio_N = ratio_N.clamp(max=largest)
    return PolicyLoss(
        loss=-torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N),
        ratio=seen_N,
        clipped_low=(seen_N < 1.0 - clip_low) & (advantages_N < 0),
        clipped_high=((seen_N > 1.0 + clip_high) & (advantages_N > 0))
        | ((seen_N > largest) & (advantages_N < 0)),
    )
