"""Logprobs and entropies of chosen positions, without a logits matrix for the others.

Shape letters: N chosen positions, H hidden size, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

_CHUNK_ELEMENTS = 1 << 24  # of N x V: 64 MiB of float32 logits at a time

Head = Callable[[torch.Tensor], torch.Tensor]


def token_logprobs(
    hidden_NH: torch.Tensor,
    token_ids_N: torch.Tensor,
    *,
    head: Head,
    vocabulary_size: int,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob [N] of each token at the temperature, and the distribution's entropy [N].

    Both float32 whatever the dtype of the hidden states. The entropy has a gradient only if it is
    asked for. Chunks are recomputed in the backward pass, so memory is bounded by the chunk, not
    by N.
    """
    if len(token_ids_N) == 0:
        empty = hidden_NH.new_zeros(0, dtype=torch.float32)
        return empty, empty
    size = max(1, _CHUNK_ELEMENTS // vocabulary_size)
    if len(token_ids_N) <= size:
        return _chunk(hidden_NH, token_ids_N, head, temperature, entropy_gradient)
    parts = [
        checkpoint(
            _chunk, hidden, token_ids, head, temperature, entropy_gradient, use_reentrant=False
        )
        for hidden, token_ids in zip(hidden_NH.split(size), token_ids_N.split(size), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk(
    hidden_NH: torch.Tensor,
    token_ids_N: torch.Tensor,
    head: Head,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_NV = torch.log_softmax(head(hidden_NH).float() / temperature, dim=-1)
    chosen_N = logprobs_NV.gather(1, token_ids_N[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return chosen_N, entropy_N
