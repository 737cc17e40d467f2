"""An attention implementation for transformers models: packed rows, and float32 on CPUs.

In a forward pass with `packed_row=`, tokens attend along the row's nodes; otherwise attention is
that of transformers. Under bfloat16 autocast on a CPU, attention runs in float32, because torch has
no fast bfloat16 backward there: on Wordle's shapes float32 takes a third of the time, casts
included. Matrix products stay in bfloat16.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import dropout, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from openenv_pipe.algorithms.batch import Node
from openenv_pipe.models.forward.attention.tree import plan_attention, tree_attention

NAME = "openenv_pipe"
OWN = "eager"  # what transformers calls the attention that a model's authors wrote
LONG_SAMPLES = 1024  # tokens; for shorter samples, one call each takes longer than one for all
# Options of attention that packed rows do not have.
UNSUPPORTED = {"softcap": "capped scores", "s_aux": "sinks", "position_bias": "biases of positions"}


def use_packed_attention(model: Any) -> None:
    """Switch a transformers model to this attention; its weights and results keep their dtypes."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


@contextlib.contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Within the block, let a model attend as its authors wrote it, whatever that computes.

    Other attention, such as transformers' of scaled dot products, leaves out arguments that it does
    not know, such as sinks and capped scores.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(OWN)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class UnsupportedAttentionError(Exception):
    """The model's attention has an option or shape that is not implemented."""


class PackedRow:
    """The layout of one packed row, passed as `packed_row` to each layer of a forward pass."""

    def __init__(
        self,
        nodes: Sequence[Node],
        device: torch.device,
        length: int,
        read: torch.Tensor | None = None,
    ) -> None:
        """length: of the longest sample. read: the tokens, each once, whose last hidden states are
        read; None: all of them."""
        self.read = read
        self.length = length
        self.plan = plan_attention(nodes) if device.type == "cpu" else None
        self._nodes, self._device = nodes, device
        is_shared = any(node.parent >= 0 for node in nodes)
        # The lengths of samples that share nothing, if they are long.
        self.lengths: list[int] = []
        if not is_shared and nodes[-1].end >= LONG_SAMPLES * len(nodes):
            self.lengths = [node.end - node.start for node in nodes]

    @functools.cached_property
    def block_mask(self) -> Any:
        """The mask for FlexAttention, which all layers use."""
        from openenv_pipe.models.forward.attention.flex import build_block_mask

        return build_block_mask(self._nodes, self._device)

    def of_last_layer(self) -> "PackedRow":
        """Return the same row for a layer whose outputs are read for some tokens only."""
        row = copy.copy(self)
        if self.plan is not None and self.read is not None:
            row.plan = self.plan.reading(self.read)
        return row


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_row: PackedRow | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers calls it; query, key and value are [B, heads, T, head size].

    Raises UnsupportedAttentionError: an option is given that packed rows leave out.
    """
    dtype = query.dtype
    if packed_row is None and query.device.type != "cpu":
        return _alone(module, query, key, value, attention_mask, **options), None
    precision = torch.float32 if query.device.type == "cpu" else value.dtype
    query, key, value = (x.to(precision) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        if packed_row is None:
            output = _alone(module, query, key, value, attention_mask, **options)
        else:
            output = _packed(query, key, value, packed_row, **options)
    return output.to(dtype), None


def _alone(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend in rows that are not packed; the mask includes a sliding window.

    softcap: scores are capped smoothly at this value (Gemma 2).
    s_aux: sinks, a score for each head beside those of its keys (gpt-oss).
    """
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    repeats = query.shape[1] // key.shape[1]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    scores = query @ repeat_kv(key, repeats).transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and scores.shape[2] > 1:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sinks = s_aux.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores.float(), dim=-1)[..., : key.shape[2]].to(value.dtype)
    weights = dropout(weights, options.get("dropout", 0.0), module.training)
    return (weights @ repeat_kv(value, repeats)).transpose(1, 2)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: PackedRow,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> torch.Tensor:
    for name, meaning in UNSUPPORTED.items():
        if options.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention has {meaning} ({name})")
    if sliding_window is not None and sliding_window < row.length:
        raise UnsupportedAttentionError(
            f"its attention has sliding_window={sliding_window}, and rows have {row.length} tokens"
        )
    if query.shape[-1] != value.shape[-1]:
        sizes = f"keys of size {query.shape[-1]} and values of size {value.shape[-1]}"
        raise UnsupportedAttentionError(f"its attention has {sizes}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if row.plan is None:
        from openenv_pipe.models.forward.attention.flex import flex

        if row.lengths and query.dtype is not torch.float32:
            return each_alone(query, key, value, row.lengths, scale)
        return flex(query, key, value, row.block_mask, scale)
    repeats = query.shape[1] // key.shape[1]
    return tree_attention(
        query, repeat_kv(key, repeats), repeat_kv(value, repeats), row.plan, scale
    )


def each_alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Return the output [1, T, heads, D] of samples that share no tokens, by torch's own kernels.

    For long samples these take less time than FlexAttention's. On a GPU they are not used in
    float32, for which torch would make the matrix of all scores.
    """
    parts = zip(*(each.split(lengths, dim=2) for each in (query, key, value)), strict=True)
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        for q, k, v in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)
