"""Estimators of KL(policy || reference) per token, and what has their gradient.

All by Schulman 2020, "Approximating KL divergence". An estimator's mean under the policy is the
divergence (k2: nearly), but the gradient of that mean is not the mean of the gradients: the policy
also decides which tokens there are to look at. NeMo-RL #2506 and arXiv:2506.09477 tell what comes
of leaving that out: k1 has no gradient at all on average, k3 that of another divergence.

Shape letter: N trained tokens of a batch.
"""

from typing import Literal

import torch

from openenv_pipe.algorithms.losses.ratios import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """k1: the log ratio. k2: half its square. k3: never negative, and of small variance."""
    difference_N = (logprobs_N - reference_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return difference_N
        case "k2":
            return 0.5 * difference_N.square()
        case "k3":
            return torch.exp(-difference_N) + difference_N - 1.0


def kl_loss(estimate_N: torch.Tensor, ratio_N: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimates times the ratio of the policy to what sampled: its mean over the samples has the
    divergence's own gradient (for k3 DeepSeek-V3.2, arXiv:2512.02556).

    k1 and k3 need the ratio's gradient. Of k2 the plain gradient is already the right one, so
    its ratio is a weight.
    """
    return estimate_N * (ratio_N.detach() if estimator == "k2" else ratio_N)
