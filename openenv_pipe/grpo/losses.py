"""Policy losses over the tokens that the model chose. Shape letter: N trained tokens of a batch.

Functions see trained tokens only, gathered from the batch by its mask: what is not trained
cannot leak into a loss, not even as 0 * NaN.
"""

from typing import Literal

import torch

LossType = Literal["grpo", "dr_grpo", "dapo"]


def clipped_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped objective per token (Schulman et al. 2017, arXiv:1707.06347), as a loss.

    `clip_high` above `clip_low` is DAPO's clip-higher (arXiv:2503.14476). Returns the loss [N]
    and the probability ratio to the sampler [N], detached.
    """
    ratio_N = torch.exp(logprobs_N - old_logprobs_N)
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    return loss_N, ratio_N.detach()


def clipped_share(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, *, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Number of tokens whose gradient the clip removes (a scalar; divide by N for the share)."""
    above = (ratio_N > 1.0 + clip_high) & (advantages_N > 0)
    below = (ratio_N < 1.0 - clip_low) & (advantages_N < 0)
    return (above | below).sum()


def kl_k3(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimator of KL(policy || reference) per token: never negative."""
    difference_N = reference_N - logprobs_N
    return torch.exp(difference_N) - difference_N - 1.0


def token_weights(
    loss_mask_BT: torch.Tensor,
    *,
    loss_type: LossType,
    num_samples: int,
    num_tokens: int,
    max_tokens: int,
) -> torch.Tensor:
    """What each trained token of the batch weighs in the loss of the whole update, [N].

    The counts are those of the whole update, not of this batch, so that the sum over batches
    does not depend on how samples were split over them.

    grpo     a mean over each sample's tokens, then over samples: 1 / (num_samples * its tokens)
    dr_grpo  a constant: 1 / (num_samples * max_tokens)     (arXiv:2503.20783)
    dapo     a mean over all tokens: 1 / num_tokens         (arXiv:2503.14476)
    """
    if loss_type == "grpo":
        lengths_B1 = loss_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        weights_BT = 1.0 / (num_samples * lengths_B1.float())
        return weights_BT.expand_as(loss_mask_BT)[loss_mask_BT]
    total = num_samples * max_tokens if loss_type == "dr_grpo" else num_tokens
    return torch.full((int(loss_mask_BT.sum()),), 1.0 / total, device=loss_mask_BT.device)
