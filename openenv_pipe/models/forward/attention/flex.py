"""Attention over packed rows on a GPU, by torch's FlexAttention.

It was not run on a GPU; without the compiled kernel it is tested against the CPU's attention.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from openenv_pipe.system.files import cache_folder
from openenv_pipe.types import Node

COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # where torch keeps compiled kernels
# torch has another kernel for rows of less than 128 tokens, which does not take dynamic shapes.
ONE_KERNEL: Any = {"FORCE_USE_FLEX_ATTENTION": True}
_Rule = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


def build_block_mask(nodes: Sequence[Node], device: torch.device) -> Any:
    """Build the mask of a row once for all layers of a batch."""
    length = nodes[-1].end
    return create_block_mask(
        rule(nodes, device), B=None, H=None, Q_LEN=length, KV_LEN=length, device=device.type
    )


def rule(nodes: Sequence[Node], device: torch.device) -> _Rule:
    """Return the mask rule: q sees k if k <= q < the end of k's subtree.

    Nodes are in depth-first order, so this holds exactly for q's own node and its ancestors.
    """
    ends_T = torch.cat(
        [torch.full((node.end - node.start,), node.subtree_end) for node in nodes]
    ).to(device)

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends_T[key])

    return sees


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    if COMPILED not in os.environ:
        # By default, torch runs what it finds in a folder of /tmp that anybody can make before it.
        folder = cache_folder() / "inductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[COMPILED] = str(folder)
    return torch.compile(flex_attention, dynamic=True)


def flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any, scale: float
) -> torch.Tensor:
    """Return the output [1, T, heads, D]; query is [1, heads, T, D], key and value may have fewer
    heads."""
    output = _compiled()(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=True,
        kernel_options=ONE_KERNEL,
    )
    return output.transpose(1, 2)
