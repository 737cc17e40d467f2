"""Exact attention over a packed row of prefix trees, forward and backward, by few dense products.

A long stretch that several samples share is a block: all tokens below it attend to it in one
product without a mask. The rest of each sample is a short row in a padded, causal batch. A token's
parts are merged by their logsumexp; the backward pass of each part, given the merged output and
logsumexp, yields that part's share of the gradient (as in ring attention, arXiv:2310.01889). The
kernel is torch's own for CPUs.
Shape letters: T tokens of the row, A heads, D head size, R rows of a bucket, S tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from openenv_pipe.types import Node

_forward_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

MIN_BLOCK = (
    32  # tokens; shorter shared stretches are repeated in the rows, which is cheaper than a part
)
BUCKET_SPAN = 0.8  # the shortest row of a bucket as a fraction of the longest
UNSEEN = 1e30  # as a logsumexp it makes every probability and every gradient 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Rows of similar length. A token of several rows is owned by one, where its query counts."""

    places: torch.Tensor  # [R * S] int64: the token of the packed row; arbitrary for padding
    num_rows: int
    own_slots: torch.Tensor  # [O] int64 into R * S: the queries that count
    own_places: torch.Tensor  # [O] int64 into T: their tokens
    used_slots: torch.Tensor | None  # keys without padding; None if these are the own ones
    used_places: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """The blocks and buckets that a packed row is computed with."""

    blocks: list[Node]
    buckets: list[Bucket]
    # int64, ascending: the tokens whose outputs are read, so that only their queries attend to
    # blocks above them; None: all
    read: torch.Tensor | None = None

    def below(self, block: Node) -> slice | torch.Tensor:
        """Return the tokens whose queries attend to a block above them."""
        if self.read is None:
            return slice(block.end, block.subtree_end)
        ends = torch.tensor([block.end, block.subtree_end])
        return self.read[slice(*torch.searchsorted(self.read, ends).tolist())]


def plan_attention(nodes: Sequence[Node]) -> AttentionPlan:
    """Plan the attention of a row that consists of these nodes."""
    is_inner = [False] * len(nodes)
    for node in nodes:
        if node.parent >= 0:
            is_inner[node.parent] = True
    is_block: list[bool] = []
    rows: list[torch.Tensor] = []
    above: list[list[torch.Tensor]] = []  # for each node: ancestors' stretches that are not blocks
    for number, node in enumerate(nodes):
        stands_high = node.parent < 0 or is_block[node.parent]
        is_block.append(stands_high and is_inner[number] and node.end - node.start >= MIN_BLOCK)
        inherited = above[node.parent] if node.parent >= 0 else []
        own = [] if is_block[-1] else [torch.arange(node.start, node.end)]
        above.append(inherited + own)
        if not is_inner[number]:
            rows.append(torch.cat(above[-1]))
    blocks = [node for node, chosen in zip(nodes, is_block, strict=True) if chosen]
    return AttentionPlan(blocks=blocks, buckets=_buckets(rows, nodes[-1].end))


def _buckets(rows: list[torch.Tensor], length: int) -> list[Bucket]:
    rows = sorted(rows, key=len, reverse=True)
    parts: list[list[torch.Tensor]] = []
    for row in rows:
        if parts and len(row) >= BUCKET_SPAN * len(parts[-1][0]):
            parts[-1].append(row)
        else:
            parts.append([row])
    is_owned = torch.zeros(length, dtype=torch.bool)
    return [_bucket(part, is_owned) for part in parts]


def _bucket(rows: list[torch.Tensor], is_owned: torch.Tensor) -> Bucket:
    """Make a bucket and mark its tokens as owned."""
    width = len(rows[0])
    places = torch.zeros(len(rows), width, dtype=torch.int64)
    is_used, is_new = torch.zeros(2, len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        places[number, : len(row)] = row
        is_used[number, : len(row)] = True
        is_new[number, : len(row)] = ~is_owned[row]
        is_owned[row] = True
    places, is_used = places.flatten(), is_used.flatten()
    used_slots = is_used.nonzero()[:, 0]
    used_places = places[used_slots]
    is_own = is_new.flatten()[used_slots]
    repeats = not is_own.all()
    return Bucket(
        places=places,
        num_rows=len(rows),
        own_slots=used_slots[is_own],
        own_places=used_places[is_own],
        used_slots=used_slots if repeats else None,
        used_places=used_places if repeats else None,
    )


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Return the output [1, T, A, D]; query, key and value are [1, A, T, D] with equal heads."""
    return _TreeAttention.apply(query, key, value, plan, scale)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
    ) -> torch.Tensor:
        query_TAD, key_TAD, value_TAD = (x[0].transpose(0, 1) for x in (query, key, value))
        out_TAD = torch.empty(query_TAD.shape, dtype=query.dtype)
        lse_TA = torch.empty(query_TAD.shape[:2], dtype=torch.float32)
        for bucket in plan.buckets:
            q, k, v = (_rows(x, bucket) for x in (query_TAD, key_TAD, value_TAD))
            out, lse = _forward_part(q, k, v, 0.0, True, scale=scale)
            _put(out_TAD, bucket, out.transpose(1, 2))
            _put(lse_TA, bucket, lse.transpose(1, 2))
        for block in plan.blocks:
            own = slice(block.start, block.end)
            out, lse = _part(query_TAD, key_TAD, value_TAD, own, own, scale)
            out_TAD[own], lse_TA[own] = out, lse
        for block in plan.blocks:
            below, own = plan.below(block), slice(block.start, block.end)
            out, lse = _part(query_TAD, key_TAD, value_TAD, below, own, scale)
            _merge(out_TAD, lse_TA, below, out, lse)
        ctx.save_for_backward(query, key, value, out_TAD, lse_TA)
        ctx.plan, ctx.scale = plan, scale
        return out_TAD[None]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out_TAD, lse_TA = ctx.saved_tensors
        given = [x[0].transpose(0, 1) for x in (query, key, value)]
        grad_TAD = grad[0]
        grads = [torch.zeros(out_TAD.shape, dtype=out_TAD.dtype) for _ in range(3)]
        for bucket in ctx.plan.buckets:
            _backward_bucket(bucket, given, grad_TAD, out_TAD, lse_TA, ctx.scale, grads)
        for block in ctx.plan.blocks:
            own = slice(block.start, block.end)
            for queries in (own, ctx.plan.below(block)):
                _backward_block(queries, own, given, grad_TAD, out_TAD, lse_TA, ctx.scale, grads)
        return (*(x.transpose(0, 1)[None] for x in grads), None, None)


def _backward_bucket(
    bucket: Bucket,
    given: list[torch.Tensor],
    grad_TAD: torch.Tensor,
    out_TAD: torch.Tensor,
    lse_TA: torch.Tensor,
    scale: float,
    grads: list[torch.Tensor],
) -> None:
    """Add the bucket's contribution to the gradients of query, key and value."""
    lse = lse_TA.new_full((len(bucket.places), lse_TA.shape[1]), UNSEEN)
    lse[bucket.own_slots] = lse_TA[bucket.own_places]
    lse = lse.view(bucket.num_rows, -1, lse.shape[1]).transpose(1, 2)
    q, k, v, grad, out = (_rows(x, bucket) for x in (*given, grad_TAD, out_TAD))
    found = _backward_part(grad, q, k, v, out, lse, 0.0, True, scale=scale)
    for number, (total, part) in enumerate(zip(grads, found, strict=True)):
        part = part.transpose(1, 2).reshape(-1, *total.shape[1:])
        if number == 0 or bucket.used_slots is None or bucket.used_places is None:
            total.index_copy_(0, bucket.own_places, part.index_select(0, bucket.own_slots))
        else:
            total.index_add_(0, bucket.used_places, part.index_select(0, bucket.used_slots))


def _backward_block(
    queries: slice | torch.Tensor,
    keys: slice,
    given: list[torch.Tensor],
    grad_TAD: torch.Tensor,
    out_TAD: torch.Tensor,
    lse_TA: torch.Tensor,
    scale: float,
    grads: list[torch.Tensor],
) -> None:
    """Add the contribution of the queries' attention to a block's keys."""
    q, grad, out = (_heads(x[queries]) for x in (given[0], grad_TAD, out_TAD))
    k, v = (_heads(x[keys]) for x in given[1:])
    lse = lse_TA[queries].t()[None]
    found = _backward_part(grad, q, k, v, out, lse, 0.0, queries is keys, scale=scale)
    for total, part, where in zip(grads, found, (queries, keys, keys), strict=True):
        total[where] += part[0].transpose(0, 1)


def _part(
    query_TAD: torch.Tensor,
    key_TAD: torch.Tensor,
    value_TAD: torch.Tensor,
    queries: slice | torch.Tensor,
    keys: slice,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one stretch to another, or causally to itself; returns [., A, D] and [., A]."""
    q, k, v = (_heads(x) for x in (query_TAD[queries], key_TAD[keys], value_TAD[keys]))
    out, lse = _forward_part(q, k, v, 0.0, queries is keys, scale=scale)
    return out[0].transpose(0, 1), lse[0].t()


def _heads(values_TAD: torch.Tensor) -> torch.Tensor:
    return values_TAD.transpose(0, 1)[None]


def _rows(values_TAD: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Return the rows of a bucket, [R, A, S, D]."""
    picked = values_TAD.index_select(0, bucket.places)
    return picked.view(bucket.num_rows, -1, *values_TAD.shape[1:]).transpose(1, 2)


def _put(target: torch.Tensor, bucket: Bucket, values_RS: torch.Tensor) -> None:
    values = values_RS.reshape(-1, *target.shape[1:])
    target.index_copy_(0, bucket.own_places, values.index_select(0, bucket.own_slots))


def _merge(
    out_TAD: torch.Tensor,
    lse_TA: torch.Tensor,
    tokens: slice | torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    """Merge one more part of these tokens' attention into an output and its logsumexp."""
    out, lse = out_TAD[tokens], lse_TA[tokens]
    both = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - both)[..., None])
    out.addcmul_(part, torch.exp(part_lse - both)[..., None])
    lse.copy_(both)
    if not isinstance(tokens, slice):  # a slice is a view
        out_TAD[tokens], lse_TA[tokens] = out, lse
