"""The keys and values that a fast forward pass caches, and the attention of new tokens to them.

The members of a group begin with the same prompt, whose keys and values are stored once. The
queries of all members are multiplied with them in one product, not in one for each row, and a pass
reads that much less memory.

Shape letters: N new tokens, P pieces of rows, Q tokens of the longest piece, K key-value heads,
J query heads of each of them, D head size, W own tokens that a pass may look at, G groups of pieces
with one prefix, M pieces of the largest group, L tokens of the longest prefix, R rows and C
capacity of a row of the cache in tokens.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

# tokens; then capacity doubles, so that copies are few. With a power of two, the tokens of all rows
# would compete for the same places in the processor's cache.
MIN_CAPACITY = 544


class RowStore:
    """The keys and the values of each layer, [R, K, C, D].

    They are separate, because a pass that reads only one of them loads no memory of the other.
    """

    def __init__(self, *, num_layers: int, num_kv_heads: int, head_size: int) -> None:
        self.num_rows = 0
        self.capacity = 0
        self.width = 0  # of the longest row so far, in tokens; there are zeros after it
        self._num_kv_heads = num_kv_heads
        self._head_size = head_size
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._num_layers = num_layers

    def reserve(self, num_rows: int, width: int) -> None:
        """Make room for at least so many rows of so many tokens."""
        num_rows, capacity = max(num_rows, self.num_rows), self.capacity
        used, self.width = self.width, max(width, self.width)
        if width > capacity:
            capacity = max(capacity, MIN_CAPACITY)
            while capacity < width:
                capacity *= 2
        if (num_rows, capacity) == (self.num_rows, self.capacity):
            return
        shape = (num_rows, self._num_kv_heads, capacity, self._head_size)
        for layers in (self.keys, self.values):
            for number in range(self._num_layers):  # one by one: only one layer is there twice
                grown = _zeros(shape)
                if number < len(layers):
                    grown[: self.num_rows, :, :used] = layers[number][:, :, :used]
                layers[number : number + 1] = [grown]
        self.num_rows, self.capacity = num_rows, capacity

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Overwrite the target rows with the source rows as they were before the call."""
        from_R, to_R = torch.tensor(sources), torch.tensor(targets)
        for layer in (*self.keys, *self.values):
            used = layer[:, :, : self.width]
            used[to_R] = used[from_R]

    def copy_tokens(self, source: int, targets: Sequence[int], tokens: slice) -> None:
        """Overwrite some tokens of the target rows with those of the source row."""
        if targets:
            to_R = torch.tensor(targets)
            for layer in (*self.keys, *self.values):
                layer[to_R, :, tokens] = layer[source, :, tokens]

    def copy_prefix(self, row: int, source: "RowStore", source_row: int, width: int) -> None:
        """Overwrite the first tokens of a row with those of a row of another store."""
        self.reserve(0, width)
        for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for to, layer in zip(mine, theirs, strict=True):
                to[row, :, :width] = layer[source_row, :, :width]

    def places(self, rows_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """Return where the heads of tokens are, [N * K], for `write`."""
        heads = torch.arange(self._num_kv_heads) * self.capacity
        first_N = rows_N * (self._num_kv_heads * self.capacity) + positions_N
        return (first_N[:, None] + heads).flatten()

    def write(
        self, layer: int, places: torch.Tensor, keys_NKD: torch.Tensor, values_NKD: torch.Tensor
    ) -> None:
        size = self._head_size
        self.keys[layer].view(-1, size).index_copy_(0, places, keys_NKD.reshape(-1, size))
        self.values[layer].view(-1, size).index_copy_(0, places, values_NKD.reshape(-1, size))


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """Return float32 zeros in a mapping of their own, which ends with the tensor.

    Capacity beyond the longest row takes no memory, because the system gives small pages when they
    are written. malloc would keep the memory of each smaller store, for each thread, after the
    store has grown.
    """
    num_values = math.prod(shape)
    if not num_values:
        return torch.zeros(shape)
    mapping = mmap.mmap(-1, 4 * num_values, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel that has no huge pages
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.float32).view(shape)


def rows_of(rows: Sequence[int]) -> slice | torch.Tensor:
    """Return an index of rows that is a slice, which copies nothing, where they are neighbours."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)


class SharedPrefixes:
    """The prefixes of the pieces of a pass."""

    def __init__(
        self, store: RowStore, prefixes_P: Sequence[int | None], lengths: Sequence[int]
    ) -> None:
        """prefixes_P: the row of the store that a piece begins with; None: it begins with none.

        lengths: of each row of the store, in tokens.
        """
        members: dict[int | None, list[int]] = {}
        for piece, prefix in enumerate(prefixes_P):
            members.setdefault(prefix, []).append(piece)
        size = _num_members([len(pieces) for pieces in members.values()])
        groups = [
            (row, pieces[first : first + size])
            for row, pieces in members.items()
            for first in range(0, len(pieces), size)
        ]
        place_of = {
            piece: number * size + place
            for number, (_, pieces) in enumerate(groups)
            for place, piece in enumerate(pieces)
        }
        self._shape_GM = len(groups), size
        self._place_P = torch.tensor([place_of[piece] for piece in range(len(prefixes_P))])
        padded = [pieces + pieces[:1] * (size - len(pieces)) for _, pieces in groups]
        self._piece_GM = torch.tensor(padded).flatten()
        # Nothing has to be moved where the members of full groups are neighbours.
        self._is_in_order = self._piece_GM.equal(torch.arange(len(prefixes_P)))
        self._rows_G = rows_of([row or 0 for row, _ in groups])
        lengths_G = torch.tensor([0 if row is None else lengths[row] for row, _ in groups])
        self._width = int(lengths_G.max())
        is_seen_GL = torch.arange(self._width) < lengths_G[:, None]
        bias_GL = torch.zeros(is_seen_GL.shape).masked_fill_(~is_seen_GL, -torch.inf)
        kv_heads = store.keys[0].shape[1]
        self._bias = bias_GL[:, None].expand(-1, kv_heads, -1).reshape(-1, 1, self._width)
        self._store = store

    def scores(self, layer: int, queries: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the scores [G, M, K, J * Q, L] of queries [P, K, J * Q, D]."""
        scaled = self._heads_first(self.grouped(queries * scale))
        keys = self._store.keys[layer][self._rows_G, :, : self._width].flatten(0, 1)
        scores = torch.baddbmm(self._bias, scaled, keys.transpose(1, 2))
        return self._members_first(scores)

    def output(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """Return the outputs [P, K, J * Q, D] of weights [G, M, K, J * Q, L]."""
        values = self._store.values[layer][self._rows_G, :, : self._width].flatten(0, 1)
        return self.in_pieces(self._members_first(torch.bmm(self._heads_first(weights), values)))

    def grouped(self, values: torch.Tensor) -> torch.Tensor:
        """Return [P, K, J * Q, X] as [G, M, K, J * Q, X]."""
        moved = values if self._is_in_order else values.index_select(0, self._piece_GM)
        return moved.view(*self._shape_GM, *values.shape[1:])

    def in_pieces(self, values: torch.Tensor) -> torch.Tensor:
        """Return [G, M, K, J * Q, X] as [P, K, J * Q, X]."""
        values = values.flatten(0, 1)
        return values if self._is_in_order else values.index_select(0, self._place_P)

    def _heads_first(self, values: torch.Tensor) -> torch.Tensor:
        """Return [G, M, K, J * Q, X] as [G * K, M * J * Q, X]."""
        num_groups, num_members, kv_heads, num_queries, size = values.shape
        shape = num_groups * kv_heads, num_members * num_queries, size
        return values.transpose(1, 2).reshape(shape)

    def _members_first(self, values: torch.Tensor) -> torch.Tensor:
        """Return [G * K, M * J * Q, X] as a view [G, M, K, J * Q, X]."""
        num_groups, num_members = self._shape_GM
        kv_heads = len(values) // num_groups
        return values.view(num_groups, kv_heads, num_members, -1, values.shape[-1]).transpose(1, 2)


def _num_members(sizes: Sequence[int]) -> int:
    """Return the number of members up to which a group is padded; larger groups are divided.

    Reading the keys and values of a prefix costs as much as two members' products with them.
    """

    def cost(num_members: int) -> int:
        return (num_members + 2) * sum(-(-size // num_members) for size in sizes)

    return min(sorted(set(sizes), reverse=True), key=cost)


class RowAttention:
    """Computes, in each layer, the attention of a pass's new tokens to the cached ones."""

    def __init__(
        self,
        store: RowStore,
        rows: slice | torch.Tensor,
        positions_PQ: torch.Tensor,
        *,
        num_heads: int,
        scale: float,
        place_N: torch.Tensor | None = None,
        shared: SharedPrefixes | None = None,
    ) -> None:
        """positions_PQ: of the tokens among the row's own ones.

        place_N: where each token is among the P * Q; None: none is padding. shared: prefixes of the
        rows; None: they have none.
        """
        self._store = store
        self._rows = rows
        self._shape_PQ = num_pieces, longest = positions_PQ.shape
        self._scale = scale
        self._place_N = place_N
        self._shared = shared
        self._width = width = min(int(positions_PQ.max()) + 1, store.width)
        is_hidden_PQW = torch.arange(width) > positions_PQ[..., None]
        bias_PQW = torch.zeros(num_pieces, longest, width).masked_fill_(is_hidden_PQW, -torch.inf)
        kv_heads = store.keys[0].shape[1]
        per_head = num_heads // kv_heads
        bias = bias_PQW[:, None, None].expand(-1, kv_heads, per_head, -1, -1)
        self._bias = bias.reshape(num_pieces * kv_heads, per_head * longest, width)

    def __call__(self, layer: int, queries_NHD: torch.Tensor) -> torch.Tensor:
        """Return the outputs [N, H * D]."""
        queries = self._heads_first(queries_NHD)
        keys = self._store.keys[layer][self._rows, :, : self._width]
        values = self._store.values[layer][self._rows, :, : self._width]
        scores = torch.baddbmm(
            self._bias,
            queries.flatten(0, 1),
            keys.flatten(0, 1).transpose(1, 2),
            alpha=self._scale,
        )
        if self._shared is None:
            output = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
            return self._tokens_first(output.view(queries.shape))
        shared = self._shared
        scores = scores.view(*queries.shape[:-1], -1)
        of_shared = shared.scores(layer, queries, self._scale)
        weights = torch.cat([of_shared, shared.grouped(scores)], dim=-1).softmax(-1)
        shared_weights, own_weights = weights.split([of_shared.shape[-1], self._width], dim=-1)
        own_weights = shared.in_pieces(own_weights)
        output = torch.bmm(own_weights.flatten(0, 1), values.flatten(0, 1)).view(queries.shape)
        output += shared.output(layer, shared_weights)
        return self._tokens_first(output)

    def _heads_first(self, queries_NHD: torch.Tensor) -> torch.Tensor:
        """Return [P, K, J * Q, D]."""
        (num_pieces, longest), size = self._shape_PQ, queries_NHD.shape[-1]
        kv_heads = self._store.keys[0].shape[1]
        if self._place_N is not None:
            spread = queries_NHD.new_zeros(num_pieces * longest, *queries_NHD.shape[1:])
            queries_NHD = spread.index_copy_(0, self._place_N, queries_NHD)
        queries = queries_NHD.reshape(num_pieces, longest, kv_heads, -1, size)
        return queries.permute(0, 2, 3, 1, 4).reshape(num_pieces, kv_heads, -1, size)

    def _tokens_first(self, output: torch.Tensor) -> torch.Tensor:
        """Return [P, K, J * Q, D] as [N, H * D]."""
        (num_pieces, longest), kv_heads = self._shape_PQ, output.shape[1]
        output = output.view(num_pieces, kv_heads, -1, longest, output.shape[-1])
        output = output.permute(0, 3, 1, 2, 4).reshape(num_pieces * longest, -1)
        return output if self._place_N is None else output[self._place_N]
