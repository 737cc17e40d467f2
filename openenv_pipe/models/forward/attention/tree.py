"""Exact attention over a packed row of prefix trees, forward and backward, by few dense products.

A long stretch that several samples share is a block: all tokens below it attend to it in one
product without a mask. The rest of each sample is a short row in a padded batch, in which some
queries at a time attend to the keys before them. A token's parts are merged by their logsumexp; the
backward pass of each part, given the merged output and logsumexp, yields that part's share of the
gradient (as in ring attention, arXiv:2310.01889). The kernel is torch's own for CPUs.
Shape letters: T tokens of the row, A heads, D head size, R rows of a bucket, S tokens of a row, Q
queries of a row, K keys of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from openenv_pipe.algorithms.batch import Node

_forward_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# tokens; shorter shared stretches are repeated in the rows, which is cheaper than a part
MIN_BLOCK = 32
MAX_QUERIES = 64  # of a row at once; the more there are, the more of their products are masked
# tokens; for longer rows, masks cost more than the products that the kernel's own causal mode
# computes in vain
LONG_ROW = 1024
BUCKET_SPAN = 0.8  # the shortest row of a bucket as a fraction of the longest
UNSEEN = 1e30  # as a logsumexp it makes every probability and every gradient 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Queries:
    """Some queries of a bucket, in its R rows of Q slots. A token of several rows asks in one."""

    places: torch.Tensor  # [R * Q] int64: the token of the packed row; arbitrary for padding
    own_slots: torch.Tensor  # [O] int64 into R * Q: the queries that count
    own_places: torch.Tensor  # [O] int64 into T: their tokens
    num_keys: int  # K: they see only the first ones of a row
    # [R, Q] int64 into S, or [1, Q] for all rows: the last key that each of them sees; None: Q is
    # K, and each sees the keys up to its own place
    last_seen: torch.Tensor | None

    def mask(self) -> torch.Tensor | None:
        """Return [R or 1, 1, Q, K]: 0 for the keys that a query sees, else -inf."""
        if self.last_seen is None:
            return None
        is_hidden = torch.arange(self.num_keys) > self.last_seen[:, None, :, None]
        return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Rows of similar length, padded to S slots."""

    places: torch.Tensor  # [R * S] int64: the token of the packed row; arbitrary for padding
    num_rows: int
    used_slots: torch.Tensor  # [U] int64 into R * S: those without padding
    used_places: torch.Tensor  # [U] int64 into T: their tokens
    query_slots: torch.Tensor  # those of used_slots where the token may ask, int64 into R * S
    queries: list[Queries]  # those that are asked, in the order of positions


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """The blocks and buckets that a packed row is computed with."""

    blocks: list[Node]  # each attends to itself
    asking: list[tuple[Node, slice | torch.Tensor]]  # a block, and tokens below it that attend
    buckets: list[Bucket]

    def reading(self, read: torch.Tensor) -> "AttentionPlan":
        """Return the plan for a layer whose outputs are read for these tokens only.

        Other tokens attend neither to blocks above them nor in their rows.

        read: int64, ascending.
        """
        asking: list[tuple[Node, slice | torch.Tensor]] = []
        for block in self.blocks:
            ends = torch.searchsorted(read, torch.tensor([block.end, block.subtree_end]))
            if len(tokens := read[slice(*ends.tolist())]):  # the kernel fails without a query
                asking.append((block, tokens))
        buckets = []
        for bucket in self.buckets:
            is_read = torch.isin(bucket.places[bucket.query_slots], read)
            queries = _queries(bucket.places, bucket.num_rows, bucket.query_slots[is_read])
            if queries:
                buckets.append(replace(bucket, queries=queries))
        return AttentionPlan(blocks=self.blocks, asking=asking, buckets=buckets)


def plan_attention(nodes: Sequence[Node]) -> AttentionPlan:
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
    # Rows of similar length go into one bucket.
    parts: list[list[torch.Tensor]] = []
    for row in sorted(rows, key=len, reverse=True):
        if parts and len(row) >= BUCKET_SPAN * len(parts[-1][0]):
            parts[-1].append(row)
        else:
            parts.append([row])
    is_owned = torch.zeros(nodes[-1].end, dtype=torch.bool)
    return AttentionPlan(
        blocks=blocks,
        asking=[(block, slice(block.end, block.subtree_end)) for block in blocks],
        buckets=[_bucket(part, is_owned) for part in parts],
    )


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
    used_slots, query_slots = is_used.nonzero()[:, 0], is_new.flatten().nonzero()[:, 0]
    if width > LONG_ROW and len(query_slots) == len(used_slots):
        # All at once, by the kernel's own causal mode.
        queries = [
            Queries(
                places=places,
                own_slots=used_slots,
                own_places=places[used_slots],
                num_keys=width,
                last_seen=None,
            )
        ]
    else:
        queries = _queries(places, len(rows), query_slots)
    return Bucket(
        places=places,
        num_rows=len(rows),
        used_slots=used_slots,
        used_places=places[used_slots],
        query_slots=query_slots,
        queries=queries,
    )


def _queries(places: torch.Tensor, num_rows: int, slots: torch.Tensor) -> list[Queries]:
    """Divide the queries at these slots of a bucket, ascending, among short rows."""
    length = len(places) // num_rows
    rows, positions = slots // length, slots % length
    counts = torch.bincount(rows, minlength=num_rows)
    ranks = torch.arange(len(slots)) - (counts.cumsum(0) - counts)[rows]
    found = []
    for first in range(0, int(counts.max()), MAX_QUERIES):
        chosen = ((ranks >= first) & (ranks < first + MAX_QUERIES)).nonzero()[:, 0]
        width = min(MAX_QUERIES, int(counts.max()) - first)
        own_slots = rows[chosen] * width + ranks[chosen] - first
        asked, last_seen = torch.zeros(2, num_rows * width, dtype=torch.int64)
        asked[own_slots], last_seen[own_slots] = places[slots[chosen]], positions[chosen]
        found.append(
            Queries(
                places=asked,
                own_slots=own_slots,
                own_places=asked[own_slots],
                num_keys=int(last_seen.max()) + 1,
                last_seen=_of_all_rows(last_seen.view(num_rows, width), own_slots),
            )
        )
    return found


def _of_all_rows(last_seen: torch.Tensor, own_slots: torch.Tensor) -> torch.Tensor:
    """Return [1, Q] if the queries that count see the same keys in each row [R, Q]."""
    highest = last_seen.amax(dim=0, keepdim=True)
    is_same = highest.expand_as(last_seen).flatten() == last_seen.flatten()
    return highest if is_same[own_slots].all() else last_seen


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
        out_TAD = torch.zeros(query_TAD.shape, dtype=query.dtype)  # what is not computed stays 0
        lse_TA = torch.empty(query_TAD.shape[:2], dtype=torch.float32)
        for bucket in plan.buckets:
            keys, values = (_rows(x, bucket.places, bucket.num_rows) for x in (key_TAD, value_TAD))
            for asked in bucket.queries:
                q = _rows(query_TAD, asked.places, bucket.num_rows)
                k, v = (x[:, :, : asked.num_keys] for x in (keys, values))
                mask = asked.mask()
                out, lse = _forward_part(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
                _put(out_TAD, asked, out.transpose(1, 2))
                _put(lse_TA, asked, lse.transpose(1, 2))
        for block in plan.blocks:
            own = slice(block.start, block.end)
            out, lse = _part(query_TAD, key_TAD, value_TAD, own, own, scale)
            out_TAD[own], lse_TA[own] = out, lse
        for block, tokens in plan.asking:
            own = slice(block.start, block.end)
            out, lse = _part(query_TAD, key_TAD, value_TAD, tokens, own, scale)
            _merge(out_TAD, lse_TA, tokens, out, lse)
        ctx.save_for_backward(query, key, value, out_TAD, lse_TA)
        ctx.plan, ctx.scale = plan, scale
        return out_TAD[None]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out_TAD, lse_TA = ctx.saved_tensors
        given = [x[0].transpose(0, 1) for x in (query, key, value)]
        grads = [torch.zeros(out_TAD.shape, dtype=out_TAD.dtype) for _ in range(3)]
        backward = _Backward(given, grad[0], out_TAD, lse_TA, ctx.scale, grads)
        for bucket in ctx.plan.buckets:
            backward.add_bucket(bucket)
        for block, tokens in ctx.plan.asking:
            backward.add_block(tokens, slice(block.start, block.end))
        for block in ctx.plan.blocks:
            own = slice(block.start, block.end)
            backward.add_block(own, own)
        return (*(x.transpose(0, 1)[None] for x in grads), None, None)


@dataclass(frozen=True, slots=True)
class _Backward:
    """Adds the contributions of parts to the gradients of query, key and value."""

    given: list[torch.Tensor]  # query, key and value
    grad: torch.Tensor  # [T, A, D], as the output
    out: torch.Tensor
    lse: torch.Tensor  # [T, A]
    scale: float
    grads: list[torch.Tensor]

    def add_bucket(self, bucket: Bucket) -> None:
        keys, values = (_rows(x, bucket.places, bucket.num_rows) for x in self.given[1:])
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        for asked in bucket.queries:
            lse = self.lse.new_full((len(asked.places), self.lse.shape[1]), UNSEEN)
            lse[asked.own_slots] = self.lse[asked.own_places]
            lse = lse.view(bucket.num_rows, -1, lse.shape[1]).transpose(1, 2)
            of_queries = (self.given[0], self.grad, self.out)
            q, grad, out = (_rows(x, asked.places, bucket.num_rows) for x in of_queries)
            k, v = (x[:, :, : asked.num_keys] for x in (keys, values))
            mask = asked.mask()
            of_query, of_keys, of_values = _backward_part(
                grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=self.scale
            )
            _put(self.grads[0], asked, of_query.transpose(1, 2))
            grad_keys[:, :, : asked.num_keys] += of_keys
            grad_values[:, :, : asked.num_keys] += of_values
        for total, part in zip(self.grads[1:], (grad_keys, grad_values), strict=True):
            flat = part.transpose(1, 2).reshape(-1, *total.shape[1:])
            total.index_add_(0, bucket.used_places, flat.index_select(0, bucket.used_slots))

    def add_block(self, queries: slice | torch.Tensor, keys: slice) -> None:
        """Add what the queries' attention to a block's keys contributes."""
        q, grad, out = (_heads(x[queries]) for x in (self.given[0], self.grad, self.out))
        k, v = (_heads(x[keys]) for x in self.given[1:])
        lse = self.lse[queries].t()[None]
        is_own = queries is keys
        found = _backward_part(grad, q, k, v, out, lse, 0.0, is_own, scale=self.scale)
        for total, part, where in zip(self.grads, found, (queries, keys, keys), strict=True):
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


def _rows(values_TAD: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the values of these tokens as rows, [R, A, S, D] or [R, A, Q, D]."""
    picked = values_TAD.index_select(0, places)
    return picked.view(num_rows, -1, *values_TAD.shape[1:]).transpose(1, 2)


def _put(target: torch.Tensor, queries: Queries, values_RQ: torch.Tensor) -> None:
    """Write what was computed for queries to their tokens."""
    values = values_RQ.reshape(-1, *target.shape[1:])
    target.index_copy_(0, queries.own_places, values.index_select(0, queries.own_slots))


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
