"""Which earlier tokens the layers of a model attend to: all, a sliding window, or their chunk.

Shape letters: R rows, Q queries of a row, K keys of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Reach:
    """The earlier tokens that one kind of layer attends to."""

    window: int | None = None  # so many tokens, the query's own included; None: any number
    chunk: int | None = None  # those of the query's chunk of so many positions; None: no chunks

    def narrowed(self, causal_R1QK: torch.Tensor, positions_RQ: torch.Tensor) -> torch.Tensor:
        """Return the causal mask, True = visible, without the keys that are out of reach."""
        positions_R1Q1 = positions_RQ[:, None, :, None]
        keys_K = torch.arange(causal_R1QK.shape[-1], device=causal_R1QK.device)
        mask = causal_R1QK
        if self.window is not None:
            mask = mask & (keys_K > positions_R1Q1 - self.window)
        if self.chunk is not None:
            mask = mask & (keys_K // self.chunk == positions_R1Q1 // self.chunk)
        return mask


def find_reaches(config: Any) -> dict[str, Reach]:
    """Return the reach of each kind of layer that the configuration of a decoder names."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    reaches = {}
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or [default]):
        if "sliding" in kind:
            reaches[kind] = Reach(window=window)
        elif kind == "chunked_attention":
            reaches[kind] = Reach(chunk=getattr(config, "attention_chunk_size", None))
        else:
            reaches[kind] = Reach()
    return reaches


def layer_masks(
    reaches: dict[str, Reach], causal_R1QK: torch.Tensor, positions_RQ: torch.Tensor
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return a mask as transformers' decoders take it: of each kind of layer, if there are several.

    positions_RQ: those of the queries. Key k of a row is its token at position k.
    """
    masks = {kind: each.narrowed(causal_R1QK, positions_RQ) for kind, each in reaches.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))
