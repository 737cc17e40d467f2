"""A forward pass for sampling on a CPU, over a copy of the policy's weights.

transformers' modules spend most of a small model's time in Python, masks and copies, and with
autocast they cast all weights again for each token. This pass computes the same products with the
same rounding in fewer operations: weights are cast once for each rollout batch, and room for keys
and values is allocated ahead. `forward_check` compares it with the model before it is used.

Shape letters: N tokens of a pass, R rows (conversations), P pieces of rows, Q tokens of the longest
piece, C capacity of a row in tokens, W tokens that a pass may look at, H query heads, K key-value
heads, D head size, V vocabulary.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from openenv_pipe.extras.cpu_sampling.packed_decoder import PackedDecoder
from openenv_pipe.extras.cpu_sampling.row_attention import (
    RowAttention,
    RowStore,
    SharedPrefixes,
    rows_of,
)
from openenv_pipe.models.forward.row_forward import Rows
from openenv_pipe.types import NO_IMAGES, Images

# tokens of a pass over prompts: few enough that what it computes stays in the processor's cache
BLOCK = 512


@dataclass(frozen=True, slots=True)
class _Piece:
    """New tokens of a row, from position `start` on."""

    row: int
    ids: Sequence[int]
    start: int
    is_last: bool = True  # of its row in this call


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """The tokens of a pass that the last layer computes, and their attention."""

    tokens: torch.Tensor  # [P] int64
    attention: RowAttention


class FastForward:
    """The pass over the rows of its own cache; its interface is `row_forward.RowForward`."""

    def __init__(self, weights: PackedDecoder) -> None:
        self._weights = weights
        self._rows = weights.new_store()
        self._prefixes = weights.new_store()
        self._ids: list[list[int]] = []  # the tokens of each row
        self._prefix_of: list[int | None] = []  # of each row, the row of the other store
        self._prefix_lengths: list[int] = []  # in tokens, by the row of that store
        self._shared: dict[int, SharedPrefixes | None] = {}  # by the number of rows in a step
        self._cos_C1D = self._sin_C1D = torch.empty(0)

    def reserve_rows(self, num_rows: int) -> None:
        self._rows.reserve(num_rows, 0)
        self._prefix_of += [None] * (num_rows - len(self._prefix_of))
        self._ids += [[] for _ in range(num_rows - len(self._ids))]

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._rows.copy_rows(sources, targets)
        copied = [(self._prefix_of[row], list(self._ids[row])) for row in sources]
        for row, of_source in zip(targets, copied, strict=True):
            self._prefix_of[row], self._ids[row] = of_source
        self._shared.clear()

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        num_rows = len(token_ids_R)
        fed = zip(self._ids, positions_R.tolist(), token_ids_R.tolist(), strict=False)
        for ids, position, token_id in fed:
            ids[position:] = [token_id]
        own_R = positions_R - torch.tensor([self._prefix_length(row) for row in range(num_rows)])
        self._rows.reserve(num_rows, int(own_R.max()) + 1)
        if num_rows not in self._shared:
            self._shared[num_rows] = self._prefixes_of(range(num_rows))
        attention = self._attention(
            self._rows, slice(num_rows), own_R[:, None], shared=self._shared[num_rows]
        )
        places = self._rows.places(torch.arange(num_rows), own_R)
        hidden = self._hidden(token_ids_R, positions_R, self._rows, places, attention)
        return self._weights.head(hidden)

    def feed(
        self, new_ids: Rows, starts: Sequence[int], images: Images = NO_IMAGES
    ) -> torch.Tensor:
        """See `RowForward`. New tokens that follow the same ones in several rows are computed once.
        At the start of a row they are also stored once; later, keys and values are copied."""
        assert not images, "this model reads text alone"
        self._shared.clear()
        for row, (ids, start) in enumerate(zip(new_ids, starts, strict=True)):
            if start < self._prefix_length(row):
                self._own_prefix(row, start)
            self._ids[row][start:] = ids
        alike: dict[tuple[int, int | None, tuple[int, ...]], list[int]] = defaultdict(list)
        for row, start in enumerate(starts):
            alike[start, self._prefix_of[row], tuple(self._ids[row])].append(row)
        whole = [rows for (start, *_), rows in alike.items() if not start and len(rows) > 1]
        grown = [rows for (start, *_), rows in alike.items() if start or len(rows) == 1]
        parts = []
        if grown:
            pieces = [_Piece(row, new_ids[row], starts[row]) for row, *_ in grown]
            parts.append(self._feed_rows(self._rows, pieces))
            for first, *others in grown:
                stored = self._prefix_length(first)
                new = slice(starts[first] - stored, len(self._ids[first]) - stored)
                self._rows.copy_tokens(first, others, new)
        if whole:
            parts.append(self._feed_rows(self._prefixes, self._share_prefixes(whole)))
        counts = torch.tensor([len(rows) for rows in (*grown, *whole)])
        order = [row for rows in (*grown, *whole) for row in rows]
        logits = torch.cat(parts).repeat_interleave(counts, dim=0)
        return logits[torch.tensor(order).argsort()]

    def _share_prefixes(self, alike: Iterable[Sequence[int]]) -> list[_Piece]:
        """Give one prefix to the rows that have the same tokens; return the prefixes to feed."""
        pieces = []
        for rows in alike:
            ids = tuple(self._ids[rows[0]])
            used = set(self._prefix_of)
            free = next(number for number in itertools.count() if number not in used)
            self._prefix_lengths[free : free + 1] = [len(ids)]
            for row in rows:
                self._prefix_of[row] = free
            pieces.append(_Piece(free, ids, 0))
        self._prefixes.reserve(len(self._prefix_lengths), 0)
        return pieces

    def _prefix_length(self, row: int) -> int:
        """Return the number of tokens of a row that are stored in its prefix."""
        prefix = self._prefix_of[row]
        return 0 if prefix is None else self._prefix_lengths[prefix]

    def _own_prefix(self, row: int, width: int) -> None:
        """Copy the first tokens of a row from its prefix into the row, and forget all others."""
        prefix = self._prefix_of[row]
        assert prefix is not None
        self._rows.copy_prefix(row, self._prefixes, prefix, width)
        self._prefix_of[row] = None

    def _prefixes_of(self, rows: Iterable[int]) -> SharedPrefixes | None:
        prefixes = [self._prefix_of[row] for row in rows]
        if all(each is None for each in prefixes):
            return None
        return SharedPrefixes(self._prefixes, prefixes, self._prefix_lengths)

    def _feed_rows(self, store: RowStore, rows: Sequence[_Piece]) -> torch.Tensor:
        """Feed rows in blocks; return the logits [R, V] after each of them."""
        hidden, is_last = [], []
        for block in _blocks(rows):
            hidden.append(self._feed_block(store, block))
            is_last += [piece.is_last for piece in block]
        return self._weights.head(torch.cat(hidden)[torch.tensor(is_last)])

    def _feed_block(self, store: RowStore, pieces: Sequence[_Piece]) -> torch.Tensor:
        """Feed pieces of different rows; return the hidden states [P, size] after each."""
        is_of_rows = store is self._rows
        rows_P = torch.tensor([piece.row for piece in pieces])
        starts_P = torch.tensor([piece.start for piece in pieces])
        lengths_P = torch.tensor([len(piece.ids) for piece in pieces])
        stored_P = torch.tensor(
            [self._prefix_length(piece.row) if is_of_rows else 0 for piece in pieces]
        )
        own_P, longest = starts_P - stored_P, int(lengths_P.max())
        store.reserve(0, int((own_P + lengths_P).max()))
        piece_N = torch.arange(len(pieces)).repeat_interleave(lengths_P)
        ends_P = lengths_P.cumsum(0)
        offset_N = torch.arange(len(piece_N)) - (ends_P - lengths_P)[piece_N]
        is_padded = len(piece_N) < len(pieces) * longest
        rows = rows_of([piece.row for piece in pieces])
        shared = self._prefixes_of(piece.row for piece in pieces) if is_of_rows else None
        attention = self._attention(
            store,
            rows,
            own_P[:, None] + torch.arange(longest),
            place_N=piece_N * longest + offset_N if is_padded else None,
            shared=shared,
        )
        of_last = self._attention(store, rows, (own_P + lengths_P - 1)[:, None], shared=shared)
        return self._hidden(
            torch.tensor([token_id for piece in pieces for token_id in piece.ids]),
            starts_P[piece_N] + offset_N,
            store,
            store.places(rows_P[piece_N], own_P[piece_N] + offset_N),
            attention,
            _Read(tokens=ends_P - 1, attention=of_last),
        )

    def _attention(
        self,
        store: RowStore,
        rows: slice | torch.Tensor,
        positions_PQ: torch.Tensor,
        *,
        shared: SharedPrefixes | None,
        place_N: torch.Tensor | None = None,
    ) -> RowAttention:
        return RowAttention(
            store,
            rows,
            positions_PQ,
            num_heads=self._weights.num_heads,
            scale=self._weights.scale,
            place_N=place_N,
            shared=shared,
        )

    def _hidden(
        self,
        token_ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        store: RowStore,
        places: torch.Tensor,
        attention: RowAttention,
        read: _Read | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states of tokens, whose keys and values go to these places.

        read: the tokens whose hidden states are returned, [P, size]; None: all, [N, size].
        """
        weights = self._weights
        num_heads, num_kv_heads, size = weights.num_heads, weights.num_kv_heads, weights.head_size
        cos_N1D, sin_N1D = self._angles(positions_N)
        hidden = embedding(token_ids_N, weights.embedding)
        for number, layer in enumerate(weights.layers):
            qkv = layer.qkv(self._normed(hidden, layer.attention_norm)).view(len(hidden), -1, size)
            qk, values = qkv.tensor_split([num_heads + num_kv_heads], dim=1)
            if layer.qk_norm is not None:
                qk = self._normed(qk, layer.qk_norm)
            qk = qk.float()
            qk = torch.addcmul(qk * cos_N1D, qk.roll(size // 2, -1), sin_N1D)
            queries, keys = qk.tensor_split([num_heads], dim=1)
            store.write(number, places, keys, values.float())
            if layer is weights.layers[-1] and read is not None:
                attention = read.attention
                hidden, queries = hidden[read.tokens], queries[read.tokens]
            hidden = hidden + layer.output(attention(number, queries))
            gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(layer.activation(gate).mul_(up))
        return self._normed(hidden, weights.norm)

    def _angles(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines [N, 1, D] of positions, with the signs of a rotation."""
        if (width := int(positions_N.max()) + 1) > len(self._cos_C1D):
            weights, positions_1C = self._weights, torch.arange(width * 5 // 4)[None]
            cos_1CD, sin_1CD = weights.rotary(weights.embedding[:1], positions_1C)
            half = weights.head_size // 2
            self._cos_C1D, sin_C1D = cos_1CD[0, :, None], sin_1CD[0, :, None]
            self._sin_C1D = torch.cat([-sin_C1D[..., :half], sin_C1D[..., half:]], dim=-1)
        return self._cos_C1D[positions_N], self._sin_C1D[positions_N]

    def _normed(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalize by the root mean square, rounding where transformers does."""
        # torch's rms_norm does the same on a CPU, with twice as many calls.
        exact = values.float()
        scale = exact.pow(2).mean(-1, keepdim=True).add_(self._weights.eps).rsqrt_()
        return weight * (exact * scale).to(values.dtype)


def _blocks(rows: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yield the rows in blocks of at most BLOCK tokens after padding; longer rows are cut."""
    block: list[_Piece] = []
    longest = 0
    for row in rows:
        for offset in range(0, len(row.ids), BLOCK):
            ids = row.ids[offset : offset + BLOCK]
            longest = max(longest, len(ids))
            if (len(block) + 1) * longest > BLOCK:
                if block:
                    yield block
                block, longest = [], len(ids)
            is_last = offset + BLOCK >= len(row.ids)
            block.append(_Piece(row.row, ids, row.start + offset, is_last))
    yield block
