"""A forward pass for sampling with small models on a CPU, over a copy of the policy's weights.

transformers' modules spend most of the time of a small model in Python, masks and copies. This pass
computes the same products with the same rounding in fewer operations: projections that read the
same input are one product, weights are cast and packed once, and keys and values are allocated
ahead. It implements decoders like Llama, Qwen2 and Qwen3 without an adapter, and
`models.forward_check` compares it with the model before it is used.

Shape letters: N tokens of a pass, R rows (conversations), P pieces of rows, Q tokens of the longest
piece, C capacity of a row in tokens, W tokens that a pass may look at, H query heads, K key-value
heads, D head size, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm

from openenv_pipe.models.products import padded
from openenv_pipe.models.row_attention import RowAttention, SharedBeginnings
from openenv_pipe.models.row_store import RowStore
from openenv_pipe.types import NO_PICTURES, Pictures

MAX_PARAMETERS = 20_000_000  # products take most of the time of larger models anyway
ARCHITECTURES = ("LlamaModel", "Qwen2Model", "Qwen3Model")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone
BLOCK = (
    512  # tokens of a pass over prompts, so that what it computes stays in the processor's cache
)
_TYPICAL_ROWS = 64  # for which oneDNN packs the weights


def unsupported_reason(model: Any, decoder: Any) -> str | None:
    """Return why this model cannot be sampled with the pass; None if it can."""
    parameters = list(model.parameters())
    if type(decoder).__name__ not in ARCHITECTURES:
        return f"its architecture is {type(decoder).__name__}"
    if hasattr(model, "peft_config"):
        return "it has an adapter"
    if parameters[0].device.type != "cpu":
        return f"it is on {parameters[0].device.type}"
    if any(values.dtype != torch.float32 for values in parameters):
        return "its weights are not float32"
    if sum(values.numel() for values in parameters) > MAX_PARAMETERS:
        return f"it has more than {MAX_PARAMETERS:,} parameters"
    if (rope_type := decoder.config.rope_parameters["rope_type"]) not in ROPE_TYPES:
        return f"its rope_type is {rope_type}"
    return None


class _Product:
    """A linear layer, or several that read the same input, packed for oneDNN where torch has it."""

    def __init__(self, modules: Sequence[torch.nn.Linear], precision: torch.dtype) -> None:
        self._weight = torch.cat([module.weight for module in modules]).to(precision)
        biases: list[torch.Tensor] = [module.bias for module in modules if module.bias is not None]
        self._bias = torch.cat(biases).to(precision) if biases else None
        self._precision = precision
        self._is_packed = torch.backends.mkldnn.is_available() and (
            precision is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _TYPICAL_ROWS)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.to(self._precision)
        if self._is_packed or self._precision is torch.bfloat16:
            return padded(inputs, self._multiply)
        return self._multiply(inputs)

    def _multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._is_packed:
            return torch.ops.mkldnn._linear_pointwise(
                inputs, self._weight, self._bias, "none", [], ""
            )
        return linear(inputs, self._weight, self._bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: _Product
    output: _Product
    gate_up: _Product
    down: _Product
    activation: Callable[[torch.Tensor], torch.Tensor]
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qk_norm: torch.Tensor | None  # [H + K, D]


class PackedDecoder:
    """A copy of the weights of a decoder and its head, which several passes may share."""

    @torch.no_grad()
    def __init__(self, decoder: Any, head: torch.nn.Linear, precision: torch.dtype) -> None:
        attention = decoder.layers[0].self_attn
        self.num_heads: int = decoder.config.num_attention_heads
        self.num_kv_heads: int = decoder.config.num_key_value_heads
        self.head_size: int = attention.head_dim
        self.scale: float = attention.scaling
        self.eps: float = decoder.config.rms_norm_eps
        self.rotary = decoder.rotary_emb
        self.embedding = decoder.embed_tokens.weight.clone()
        self.layers = [self._layer(each, precision) for each in decoder.layers]
        self.norm = decoder.norm.weight.clone()
        self.head = _Product([head], precision)

    def new_store(self) -> RowStore:
        return RowStore(
            num_layers=len(self.layers),
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
        )

    def _layer(self, layer: Any, precision: torch.dtype) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(attention, "q_norm"):
            of_queries = attention.q_norm.weight.expand(self.num_heads, -1)
            of_keys = attention.k_norm.weight.expand(self.num_kv_heads, -1)
            qk_norm = torch.cat([of_queries, of_keys])
        return _Layer(
            qkv=_Product([attention.q_proj, attention.k_proj, attention.v_proj], precision),
            output=_Product([attention.o_proj], precision),
            gate_up=_Product([mlp.gate_proj, mlp.up_proj], precision),
            down=_Product([mlp.down_proj], precision),
            activation=mlp.act_fn,
            attention_norm=layer.input_layernorm.weight.clone(),
            mlp_norm=layer.post_attention_layernorm.weight.clone(),
            qk_norm=qk_norm,
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """New tokens of a row, from position `start` on."""

    row: int
    ids: Sequence[int]
    start: int
    is_last: bool = True  # of its row in this call


class FastForward:
    """The pass over the rows of its own cache; `models.row_forward.RowForward` is its interface."""

    def __init__(self, weights: PackedDecoder) -> None:
        self._weights = weights
        self._rows = weights.new_store()
        self._beginnings = weights.new_store()
        self._beginning_of: list[int | None] = []  # of each row, the row of the other store
        self._lengths: list[int] = []  # of the beginnings, in tokens
        self._shared: dict[int, SharedBeginnings | None] = {}  # by the number of rows in a step
        self._cos_C1D = self._sin_C1D = torch.empty(0)

    def reserve_rows(self, num_rows: int) -> None:
        self._rows.reserve(num_rows, 0)
        self._beginning_of += [None] * (num_rows - len(self._beginning_of))

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._rows.copy_rows(sources, targets)
        copied = [self._beginning_of[row] for row in sources]
        for row, beginning in zip(targets, copied, strict=True):
            self._beginning_of[row] = beginning
        self._shared.clear()

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Feed one token to each of the first R rows; return the logits [R, V] after it."""
        num_rows = len(token_ids_R)
        own_R = positions_R - torch.tensor([self._length(row) for row in range(num_rows)])
        self._rows.reserve(num_rows, int(own_R.max()) + 1)
        if num_rows not in self._shared:
            self._shared[num_rows] = self._beginnings_of(range(num_rows))
        attention = self._attention(
            self._rows, slice(num_rows), own_R[:, None], shared=self._shared[num_rows]
        )
        places = self._rows.places(torch.arange(num_rows), own_R)
        hidden = self._hidden(token_ids_R, positions_R, self._rows, places, [attention])
        return self._weights.head(hidden)

    def feed(
        self,
        new_ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        pictures: Pictures = NO_PICTURES,
    ) -> torch.Tensor:
        """Feed to each row r its new tokens, at least one, from position starts[r] on.

        Returns the logits [R, V] after each row's last token. What several rows begin with is
        computed and stored once.
        """
        assert not pictures, "this model reads text alone"
        self._shared.clear()
        new_rows: dict[tuple[int, ...], list[int]] = {}
        for row, (ids, start) in enumerate(zip(new_ids, starts, strict=True)):
            if start < self._length(row):
                self._own_beginning(row, start)
            if not start:
                new_rows.setdefault(tuple(ids), []).append(row)
        begun = {ids: rows for ids, rows in new_rows.items() if len(rows) > 1}
        is_begun = {row for rows in begun.values() for row in rows}
        others = [row for row in range(len(new_ids)) if row not in is_begun]
        order, parts = [*others], []
        if others:
            pieces = [_Piece(row, new_ids[row], starts[row]) for row in others]
            parts.append(self._feed_rows(self._rows, pieces))
        if begun:
            logits = self._feed_rows(self._beginnings, self._begin(begun))
            counts = torch.tensor([len(rows) for rows in begun.values()])
            parts.append(logits.repeat_interleave(counts, dim=0))
            order += [row for rows in begun.values() for row in rows]
        return torch.cat(parts)[torch.tensor(order).argsort()]

    def _begin(self, begun: Mapping[tuple[int, ...], Sequence[int]]) -> list[_Piece]:
        """Give a beginning to rows that have the same tokens; return those to feed."""
        pieces = []
        for ids, rows in begun.items():
            used = set(self._beginning_of)
            free = next(number for number in itertools.count() if number not in used)
            self._lengths[free : free + 1] = [len(ids)]
            for row in rows:
                self._beginning_of[row] = free
            pieces.append(_Piece(free, ids, 0))
        self._beginnings.reserve(len(self._lengths), 0)
        return pieces

    def _length(self, row: int) -> int:
        """Return the number of tokens of a row that are stored in its beginning."""
        beginning = self._beginning_of[row]
        return 0 if beginning is None else self._lengths[beginning]

    def _own_beginning(self, row: int, width: int) -> None:
        """Let a row have its first tokens itself, and forget all others."""
        beginning = self._beginning_of[row]
        assert beginning is not None
        self._rows.copy_beginning(row, self._beginnings, beginning, width)
        self._beginning_of[row] = None

    def _beginnings_of(self, rows: Iterable[int]) -> SharedBeginnings | None:
        beginnings = [self._beginning_of[row] for row in rows]
        if all(each is None for each in beginnings):
            return None
        return SharedBeginnings(self._beginnings, beginnings, self._lengths)

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
        stored_P = torch.tensor([self._length(piece.row) if is_of_rows else 0 for piece in pieces])
        own_P, longest = starts_P - stored_P, int(lengths_P.max())
        store.reserve(0, int((own_P + lengths_P).max()))
        piece_N = torch.arange(len(pieces)).repeat_interleave(lengths_P)
        ends_P = lengths_P.cumsum(0)
        offset_N = torch.arange(len(piece_N)) - (ends_P - lengths_P)[piece_N]
        is_padded = len(piece_N) < len(pieces) * longest
        first, last = pieces[0].row, pieces[-1].row
        rows = slice(first, last + 1) if last - first == len(pieces) - 1 else rows_P
        shared = self._beginnings_of(piece.row for piece in pieces) if is_of_rows else None
        of_all = self._attention(
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
            [of_all, of_last],
            ends_P - 1,
        )

    def _attention(
        self,
        store: RowStore,
        rows: slice | torch.Tensor,
        positions_PQ: torch.Tensor,
        *,
        shared: SharedBeginnings | None,
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
        attentions: Sequence[RowAttention],
        last_P: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states of tokens, whose keys and values go to these places.

        attentions: of all layers but the last one, and of the last one.
        last_P: the tokens whose hidden states are read [P, size]; None: those of all [N, size].
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
            qk = torch.addcmul(qk * cos_N1D, qk.roll(size // 2, -1), sin_N1D)
            queries, keys = qk.tensor_split([num_heads], dim=1)
            store.write(number, places, keys, values.float())
            attention = attentions[0]
            if layer is weights.layers[-1]:
                attention = attentions[-1]
                if last_P is not None:
                    hidden, queries = hidden[last_P], queries[last_P]
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
        exact = rms_norm(values.float(), values.shape[-1:], None, self._weights.eps)
        return weight * exact.to(values.dtype)


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
