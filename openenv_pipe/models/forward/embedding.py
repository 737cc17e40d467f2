"""Token embeddings whose gradient is added only to the rows in use.

torch's own backward pass makes a matrix of the whole vocabulary, which for small models is most of
their memory. Here, and in `logprobs.py`, the parameter's gradient is updated in place.
"""

from typing import Any

import torch


def embed(embedding: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Look up the ids; a module that does more than look up is called as it is."""
    is_plain = type(embedding) is torch.nn.Embedding and not embedding._forward_hooks
    if is_plain and isinstance(weight := embedding.weight, torch.Tensor) and adds_in_place(weight):
        return _Rows.apply(weight, token_ids, embedding.padding_idx)
    return embedding(token_ids)


def adds_in_place(weight: torch.Tensor) -> bool:
    """True if the parameter's `grad` may be written directly: autograd does not need it."""
    return weight.requires_grad and weight.is_leaf and not weight._backward_hooks


def gradient_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the parameter's gradient, made of zeros if there is none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, token_ids: torch.Tensor, padding_id: int | None
    ) -> torch.Tensor:
        ctx.weight, ctx.padding_id = weight, padding_id
        ctx.save_for_backward(token_ids)
        return torch.nn.functional.embedding(token_ids, weight.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        (token_ids,) = ctx.saved_tensors
        rows, ids = grad.flatten(0, -2), token_ids.flatten()
        if ctx.padding_id is not None:  # As in torch, the padding token's embedding never learns.
            rows = rows.masked_fill((ids == ctx.padding_id)[:, None], 0.0)
        gradient_of(ctx.weight).index_add_(0, ids, rows.to(ctx.weight.dtype))
        return None, None, None
