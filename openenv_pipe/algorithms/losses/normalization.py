"""Normalization of a loss over tokens and samples. Shape letter: N trained tokens of a batch."""

from dataclasses import dataclass
from typing import Literal

import torch

from openenv_pipe.algorithms.losses.ratios import sample_sums

Normaliser = Literal["sample", "token", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts over all batches of an update, so that the split into batches changes no loss."""

    num_samples: int
    num_tokens: int  # that are trained
    max_tokens: int  # that a sample could have


def token_weights(
    sample_index_N: torch.Tensor, *, normaliser: Normaliser, counts: Counts
) -> torch.Tensor:
    """Return the weight of each token in the loss of the whole update, [N].

    sample     a mean over each sample's tokens, then over samples (GRPO, arXiv:2402.03300)
    token      a mean over all tokens (DAPO, arXiv:2503.14476)
    constant   a sum over each sample's tokens, over a constant: what a token weighs depends on
               no sample's length (Dr. GRPO, arXiv:2503.20783)
    """
    ones_N = torch.ones(len(sample_index_N), device=sample_index_N.device)
    match normaliser:
        case "sample":
            return ones_N / (counts.num_samples * sample_sums(ones_N, sample_index_N))
        case "token":
            return ones_N / counts.num_tokens
        case "constant":
            return ones_N / (counts.num_samples * counts.max_tokens)
