"""An attention implementation for transformers models: packed rows, and float32 on CPUs.

In a forward pass with `packed_row=`, tokens attend along the row's nodes; otherwise attention is
that of transformers. Under bfloat16 autocast on a CPU, attention runs in float32, because torch has
no fast bfloat16 backward there: on Wordle's shapes float32 takes a third of the time, casts
included. Matrix products stay in bfloat16.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from openenv_pipe.models.attention.tree import AttentionPlan, plan_attention, tree_attention
from openenv_pipe.types import Node

NAME = "openenv_pipe"
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


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
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)


class UnsupportedAttentionError(Exception):
    """The model's attention has an option or shape that is not implemented."""


class PackedRow:
    """The layout of one packed row, passed as `packed_row` to each layer of a forward pass."""

    def __init__(
        self, nodes: Sequence[Node], device: torch.device, read: torch.Tensor | None = None
    ) -> None:
        """read: the tokens, each once, whose last hidden states are read; None: all of them."""
        self.read = read
        self.plan: AttentionPlan | None = None
        self.block_mask: Any = None
        if device.type == "cpu":
            self.plan = plan_attention(nodes)
        else:
            from openenv_pipe.models.attention.flex import build_block_mask

            self.block_mask = build_block_mask(nodes, device)

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

    Raises:
        UnsupportedAttentionError: an option is given that scaled dot products leave out.
    """
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention has {name}={options[name]!r:.40}")
    dtype = query.dtype
    if packed_row is None and query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    precision = torch.float32 if query.device.type == "cpu" else value.dtype
    query, key, value = (x.to(precision) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        if packed_row is None:
            given = (query, key, value, attention_mask)
            output, _ = sdpa_attention_forward(module, *given, **options)
        else:
            output = _packed(query, key, value, packed_row, **options)
    return output.to(dtype), None


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: PackedRow,
    *,
    scaling: float | None = None,
    **options: Any,
) -> torch.Tensor:
    if query.shape[-1] != value.shape[-1]:
        sizes = f"keys of size {query.shape[-1]} and values of size {value.shape[-1]}"
        raise UnsupportedAttentionError(f"its attention has {sizes}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if row.plan is None:
        from openenv_pipe.models.attention.flex import flex

        return flex(query, key, value, row.block_mask, scale)
    repeats = query.shape[1] // key.shape[1]
    return tree_attention(
        query, repeat_kv(key, repeats), repeat_kv(value, repeats), row.plan, scale
    )
