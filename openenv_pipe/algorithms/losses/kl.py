"""Estimators of KL(policy || reference) per token, and losses with its gradient.

All by Schulman 2020, "Approximating KL divergence". An estimator's mean under the policy is the
divergence (k2: nearly), but the gradient of that mean is not the mean of the gradients: the policy
also determines which tokens are sampled. Without that term, k1 has no gradient on average, and k3
the gradient of another divergence (NeMo-RL #2506, arXiv:2506.09477).

Shape letter: N trained tokens of a batch.
"""

from typing import Literal

import torch

from openenv_pipe.algorithms.losses.ratios import MAX_LOG_RATIO

MAX_SQUARED = 1e4  # of a log ratio that is squared

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """Return k1, the log ratio; k2, half its square; or k3, never negative, of small variance.

    Beyond a bound, a log ratio has no gradient. The bound of k2, whose gradient is the log ratio,
    is wide: k2 pulls hardest at the tokens that are least likely under the reference.
    """
    bound = MAX_SQUARED if estimator == "k2" else MAX_LOG_RATIO
    difference_N = (logprobs_N - reference_logprobs_N).clamp(-bound, bound)
    match estimator:
        case "k1":
            return difference_N
        case "k2":
            return 0.5 * difference_N.square()
        case "k3":
            return torch.exp(-difference_N) + difference_N - 1.0


def kl_loss(estimate_N: torch.Tensor, ratio_N: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Multiply estimates by the ratio of policy to sampler, so that the mean over samples has the
    gradient of the divergence (for k3 DeepSeek-V3.2, arXiv:2512.02556).

    k1 and k3 need the ratio's gradient. The plain gradient of k2 is already the right one, so its
    ratio is only a weight.
    """
    return estimate_N * (ratio_N.detach() if estimator == "k2" else ratio_N)
