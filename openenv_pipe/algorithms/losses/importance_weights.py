"""Importance weights for off-policy tokens: the ratio of old policy to sampler, bounded.

A sampler with other kernels, another precision or older weights has other probabilities than the
trainer, and training on its tokens as if they were the trainer's own is biased. The weights here
correct that bias, and their bounds limit the variance. Their argument is the log ratio of each
token. With the mean over its sample instead, a whole sample has one weight, the geometric mean of
its tokens' ratios, which GSPO clips too (arXiv:2507.18071); their product would explode with the
sample's length (TRL #4772).

Shape letter: N trained tokens of a batch. No weight has a gradient.
"""

from typing import NamedTuple

import torch

from openenv_pipe.algorithms.losses.ratios import ratios, sample_means


class Correction(NamedTuple):
    """The factor of each token's loss [N], and whether a bound determined it [N] bool."""

    weight: torch.Tensor
    bounded: torch.Tensor


def truncated_weights(log_ratios_N: torch.Tensor, *, high: float) -> Correction:
    """Truncated importance sampling per token (Ionides 2008; Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"): at most `high`.
    """
    ratio_N = ratios(log_ratios_N)
    return Correction(ratio_N.clamp(max=high), ratio_N > high)


def masked_weights(log_ratios_N: torch.Tensor, *, low: float, high: float) -> Correction:
    """IcePop (Ling team 2025, arXiv:2510.18855): tokens outside [low, high] are left out."""
    ratio_N = ratios(log_ratios_N)
    outside_N = (ratio_N < low) | (ratio_N > high)
    return Correction(ratio_N.masked_fill(outside_N, 0.0), outside_N)


def is_far_off_policy(
    logprobs_N: torch.Tensor,
    sampled_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sample_index_N: torch.Tensor,
    *,
    limit: float,
) -> torch.Tensor:
    """Return which tokens DeepSeek-V3.2's off-policy sequence mask leaves out (arXiv:2512.02556).

    These are tokens with a negative advantage, [N] bool, of samples whose mean log ratio of sampler
    to policy is more than `limit`, in nats: the policy has already moved away from them.
    """
    drift_N = sample_means(sampled_logprobs_N - logprobs_N.detach(), sample_index_N)
    return (advantages_N < 0) & (drift_N > limit)
