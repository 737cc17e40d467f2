"""Attention over packed rows on a GPU, by torch's FlexAttention.

Without the compiled kernel it is tested against the CPU's attention.

Shape letters: T tokens of a row, Q blocks of queries, K blocks of keys.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from openenv_pipe.algorithms.batch import Node
from openenv_pipe.system.files import cache_folder

BLOCK = 128  # tokens of a block, of queries and of keys
COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # where torch keeps compiled kernels
# torch has another kernel for rows of less than 128 tokens, which does not take dynamic shapes.
ONE_KERNEL: Any = {"FORCE_USE_FLEX_ATTENTION": True}
_Rule = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


def build_block_mask(nodes: Sequence[Node], device: torch.device) -> Any:
    """Build the mask of a row once for all layers of a batch.

    torch's own function would ask the rule for each pair of tokens: 4 GB of answers for a row of
    65,536. What blocks of queries see of blocks of keys follows from the nodes.
    """
    length = nodes[-1].end
    num_blocks = -(-length // BLOCK)
    added = (0, num_blocks * BLOCK - length)
    ends_KT = torch.nn.functional.pad(_subtree_ends(nodes), added, value=length).view(-1, BLOCK)
    starts_Q1 = torch.arange(num_blocks)[:, None] * BLOCK
    is_earlier_QK = starts_Q1.t() < starts_Q1
    is_full_QK = is_earlier_QK & (starts_Q1 + BLOCK <= ends_KT.amin(dim=1))
    is_seen_QK = (starts_Q1.t() <= starts_Q1) & (starts_Q1 < ends_KT.amax(dim=1))
    return BlockMask.from_kv_blocks(
        *_in_order(is_seen_QK & ~is_full_QK, device),
        *_in_order(is_full_QK, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=rule(nodes, device),
        seq_lengths=(length, length),
    )


def _in_order(chosen_QK: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, per block of queries, how many blocks of keys are chosen, and all, chosen first."""
    chosen_11QK = chosen_QK[None, None].to(device, torch.int32)
    order = torch.argsort(chosen_11QK, dim=-1, descending=True, stable=True)
    return chosen_11QK.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def rule(nodes: Sequence[Node], device: torch.device) -> _Rule:
    """Return the mask rule: q sees k if k <= q < the end of k's subtree.

    Nodes are in depth-first order, so this holds exactly for q's own node and its ancestors.
    """
    ends_T = _subtree_ends(nodes).to(device)

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends_T[key])

    return sees


def _subtree_ends(nodes: Sequence[Node]) -> torch.Tensor:
    return torch.cat([torch.full((node.end - node.start,), node.subtree_end) for node in nodes])


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
    """Return [1, T, heads, D]; query is [1, heads, T, D], key and value may have fewer heads."""
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
