"""Sampling that depends on a seed and a counter, and not on the other rows of the batch.

Shape letters: B rows, V vocabulary.
"""

import numpy as np
import torch
from torch.nn.functional import pad

_BLOCK = 512  # ids of the vocabulary
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniforms(seeds_B: np.ndarray, counters_B: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) per row, float64 [B]: a hash of (seed, counter), both uint64.

    SplitMix64's finaliser (Steele et al. 2014, doi 10.1145/2714064.2660195), applied twice.
    """
    with np.errstate(over="ignore"):
        mixed_B = _mix(_mix(seeds_B * _INCREMENT) + (counters_B + np.uint64(1)) * _INCREMENT)
    return (mixed_B >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values_B: np.ndarray) -> np.ndarray:
    values_B = (values_B ^ (values_B >> np.uint64(30))) * _MULTIPLIERS[0]
    values_B = (values_B ^ (values_B >> np.uint64(27))) * _MULTIPLIERS[1]
    return values_B ^ (values_B >> np.uint64(31))


def sample(
    logits_BV: torch.Tensor, temperatures_B: torch.Tensor, uniforms_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample token ids [B] int64, with their logprobs [B] float32 at each row's temperature.

    It inverts the cumulative distribution. Temperature 0 takes the most likely token, with its
    logprob at temperature 1.
    """
    greedy_B = temperatures_B == 0
    divisors_B = torch.where(greedy_B, 1.0, temperatures_B)
    logits_BV = logits_BV.float()
    # On a GPU, waiting for these values takes longer than the work that they may save.
    may_ask = logits_BV.device.type == "cpu"
    if not (may_ask and (divisors_B == 1.0).all()):
        logits_BV = logits_BV / divisors_B[:, None]
    if logits_BV.shape[1] <= _BLOCK:  # Normalized here, their logsumexp is 0.
        logits_BV = torch.log_softmax(logits_BV, dim=-1)
        ids_B, lse_B1 = _drawn(logits_BV.exp(), uniforms_B), logits_BV.new_zeros(())
    else:
        ids_B, lse_B1 = _drawn_by_blocks(logits_BV, uniforms_B)
    if not may_ask or greedy_B.any():
        ids_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), ids_B)
    return ids_B, (logits_BV.gather(1, ids_B[:, None]).double() - lse_B1)[:, 0].float()


def _drawn(weights_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Return ids [B] with probabilities in proportion to the weights; with NaN, any ids."""
    upto_BV = weights_BV.cumsum(dim=-1, dtype=torch.float64)
    return _first_above(upto_BV, uniforms_B[:, None] * upto_BV[:, -1:])[:, 0]


def _drawn_by_blocks(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [B] of a large vocabulary, and the logits' logsumexp, float64 [B, 1].

    Sums over blocks choose a block, and running sums within it an id: running sums over all ids
    take longer than the rest of sampling. torch.log_softmax would also add each row up in float32,
    and be wrong by 1e-5.
    """
    num_ids = logits_BV.shape[1]
    highest_B1 = logits_BV.amax(dim=-1, keepdim=True)
    weights_BV = (logits_BV - highest_B1).exp_()
    if num_ids % _BLOCK:
        weights_BV = pad(weights_BV, (0, -num_ids % _BLOCK))
    blocks_BNW = weights_BV.unflatten(1, (-1, _BLOCK))
    upto_BN = blocks_BNW.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    goals_B1 = uniforms_B[:, None] * upto_BN[:, -1:]
    block_B1 = _first_above(upto_BN, goals_B1)
    goals_B1 -= pad(upto_BN, (1, 0)).gather(1, block_B1)
    block_BW = blocks_BNW.take_along_dim(block_B1[:, :, None], dim=1)[:, 0]
    within_B1 = _first_above(block_BW.cumsum(dim=-1, dtype=torch.float64), goals_B1)
    ids_B = (block_B1 * _BLOCK + within_B1)[:, 0].clamp(max=num_ids - 1)
    return ids_B, highest_B1.double() + upto_BN[:, -1:].log()


def _first_above(upto_BN: torch.Tensor, goals_B1: torch.Tensor) -> torch.Tensor:
    """Return the first place [B, 1] whose running sum is above the goal.

    Rounding may leave none; then it is the last place that adds to the sum.
    """
    last_B1 = torch.searchsorted(upto_BN, upto_BN[:, -1:].contiguous())
    found_B1 = torch.searchsorted(upto_BN, goals_B1, right=True)
    # NaN gives a place past the end.
    return torch.minimum(found_B1, last_B1).clamp(max=upto_BN.shape[1] - 1)


def truncated(
    logits_BV: torch.Tensor,
    temperatures_B: torch.Tensor,
    top_p_B: torch.Tensor,
    top_k_B: torch.Tensor,
) -> torch.Tensor:
    """Return the logits of a truncated distribution: minus infinity for all but the likeliest.

    Rows of temperature 0 stay as they are.

    top_k_B: number of tokens that are kept; 0: all
    top_p_B: of these, the likeliest whose probabilities, at the temperature, add up to this are
        kept (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751); 1: all
    """
    is_sampled_B1 = (temperatures_B > 0)[:, None]
    sorted_BV, order_BV = logits_BV.float().sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    is_left_out_BV = (top_k_B[:, None] > 0) & (ranks_V >= top_k_B[:, None])
    divisors_B1 = torch.where(is_sampled_B1, temperatures_B[:, None], 1.0)
    scaled_BV = sorted_BV.masked_fill(is_left_out_BV, -torch.inf) / divisors_B1
    probabilities_BV = scaled_BV.softmax(dim=-1, dtype=torch.float64)
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    is_left_out_BV |= (top_p_B[:, None] < 1.0) & (before_BV >= top_p_B[:, None])
    is_left_out_BV[:, 0] = False
    is_left_out_BV &= is_sampled_B1
    return logits_BV.masked_fill(
        torch.zeros_like(is_left_out_BV).scatter(1, order_BV, is_left_out_BV), -torch.inf
    )
