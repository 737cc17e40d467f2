"""Attention in float32 inside bfloat16 autocast, for CPUs.

torch's CPU attention has no fast bfloat16 backward: measured on Wordle's shapes, the float32 one
takes a third of its time, casts included. Matrix products stay in bfloat16.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_float32"


def use_float32_attention(model: Any) -> None:
    """Switches a transformers model over; its weights and results keep their dtypes."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    with torch.autocast(query.device.type, enabled=False):
        output, _ = sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), attention_mask, **options
        )
    return output.to(query.dtype), None
