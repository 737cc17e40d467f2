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

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm

from openenv_pipe.models.products import padded
from openenv_pipe.types import NO_PICTURES, Pictures

MAX_PARAMETERS = 20_000_000  # products take most of the time of larger models anyway
ARCHITECTURES = ("LlamaModel", "Qwen2Model", "Qwen3Model")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone
BLOCK = (
    512  # tokens of a pass over prompts, so that what it computes stays in the processor's cache
)
_GROWTH = 64  # tokens at least, or a quarter: capacity grows in steps, so that copies are few
_TYPICAL_ROWS = 64  # for which oneDNN packs the weights

# From queries [N, H, D] and a layer's keys and values [R, K, C, 2 * D] to outputs [N, H * D].
_Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
        self._num_rows = 0
        self._capacity = 0
        self._cache: list[torch.Tensor] = []  # of each layer, keys and values [R, K, C, 2 * D]
        self._resize(0, _GROWTH)

    def reserve_rows(self, num_rows: int) -> None:
        if num_rows > self._num_rows:
            self._resize(num_rows, self._capacity)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        from_R, to_R = torch.tensor(sources), torch.tensor(targets)
        for layer in self._cache:
            layer[to_R] = layer[from_R]

    def _reserve_tokens(self, width: int) -> None:
        if width > self._capacity:
            wanted = max(width, self._capacity * 5 // 4)
            self._resize(self._num_rows, -(-wanted // _GROWTH) * _GROWTH)

    def _resize(self, num_rows: int, capacity: int) -> None:
        weights = self._weights
        shape = (num_rows, weights.num_kv_heads, capacity, 2 * weights.head_size)
        grown = [_zeros(shape) for _ in weights.layers]
        for new, old in zip(grown, self._cache, strict=False):  # there is no old one at first
            new[: self._num_rows, :, : self._capacity] = old
        self._cache, self._num_rows, self._capacity = grown, num_rows, capacity
        cos_1CD, sin_1CD = weights.rotary(weights.embedding[:1], torch.arange(capacity)[None])
        half = weights.head_size // 2
        self._cos_C1D, sin_C1D = cos_1CD[0, :, None], sin_1CD[0, :, None]
        self._sin_C1D = torch.cat([-sin_C1D[..., :half], sin_C1D[..., half:]], dim=-1)

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Feed one token to each of the first R rows; return the logits [R, V] after it."""
        num_rows = len(token_ids_R)
        self._reserve_tokens(int(positions_R.max()) + 1)
        attend = self._attention(slice(num_rows), positions_R[:, None], None)
        hidden = self._hidden(token_ids_R, torch.arange(num_rows), positions_R, attend)
        return self._weights.head(hidden)

    def feed(
        self,
        new_ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        pictures: Pictures = NO_PICTURES,
    ) -> torch.Tensor:
        """Feed to each row r its new tokens, at least one, from position starts[r] on.

        Returns the logits [R, V] after each row's last token. Of rows that begin with equal tokens,
        one is computed, and the others are copies.
        """
        assert not pictures, "this model reads text alone"
        rows = list(zip(new_ids, starts, strict=True))
        keys = [row if start else tuple(ids) for row, (ids, start) in enumerate(rows)]
        first_of: dict[object, int] = {}
        for row, key in enumerate(keys):
            first_of.setdefault(key, row)
        self._reserve_tokens(max(start + len(ids) for ids, start in rows))
        logits = self._feed_rows([_Piece(row, *rows[row]) for row in first_of.values()])
        if len(first_of) == len(rows):
            return logits
        copies = [(first_of[key], row) for row, key in enumerate(keys) if first_of[key] != row]
        self.copy_rows(*zip(*copies, strict=True))
        places = {key: place for place, key in enumerate(first_of)}
        return logits[torch.tensor([places[key] for key in keys])]

    def _feed_rows(self, rows: Sequence[_Piece]) -> torch.Tensor:
        """Feed rows in blocks; return the logits [R, V] after each of them."""
        hidden, is_last = [], []
        for block in _blocks(rows):
            hidden.append(self._feed_block(block))
            is_last += [piece.is_last for piece in block]
        return self._weights.head(torch.cat(hidden)[torch.tensor(is_last)])

    def _feed_block(self, pieces: Sequence[_Piece]) -> torch.Tensor:
        """Feed pieces of different rows; return the hidden states [P, size] after each."""
        rows_P = torch.tensor([piece.row for piece in pieces])
        starts_P = torch.tensor([piece.start for piece in pieces])
        lengths_P = torch.tensor([len(piece.ids) for piece in pieces])
        longest = int(lengths_P.max())
        piece_N = torch.arange(len(pieces)).repeat_interleave(lengths_P)
        ends_P = lengths_P.cumsum(0)
        offset_N = torch.arange(len(piece_N)) - (ends_P - lengths_P)[piece_N]
        is_padded = len(piece_N) < len(pieces) * longest
        first, last = pieces[0].row, pieces[-1].row
        hidden = self._hidden(
            torch.tensor([token_id for piece in pieces for token_id in piece.ids]),
            rows_P[piece_N],
            starts_P[piece_N] + offset_N,
            self._attention(
                slice(first, last + 1) if last - first == len(pieces) - 1 else rows_P,
                starts_P[:, None] + torch.arange(longest),
                piece_N * longest + offset_N if is_padded else None,
            ),
        )
        return hidden[ends_P - 1]

    def _attention(
        self,
        rows: slice | torch.Tensor,
        positions_PQ: torch.Tensor,
        place_N: torch.Tensor | None,
    ) -> _Attend:
        """Return the attention of the tokens at these positions of the rows.

        place_N: where each token is among the P * Q; None: none is padding.
        """
        weights, (num_pieces, longest) = self._weights, positions_PQ.shape
        width = min(int(positions_PQ.max()) + 1, self._capacity)
        kv_heads, size = weights.num_kv_heads, weights.head_size
        groups = weights.num_heads // kv_heads
        bias_PQW = torch.zeros(num_pieces, longest, width)
        bias_PQW.masked_fill_(torch.arange(width) > positions_PQ[..., None], -torch.inf)
        bias = bias_PQW[:, None, None].expand(-1, kv_heads, groups, -1, -1)
        bias = bias.reshape(num_pieces * kv_heads, groups * longest, width)

        def attend(queries: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            if place_N is not None:
                padded = queries.new_zeros(num_pieces * longest, *queries.shape[1:])
                queries = padded.index_copy_(0, place_N, queries)
            queries = queries.reshape(num_pieces, longest, kv_heads, groups, size)
            queries = queries.permute(0, 2, 3, 1, 4).reshape(len(bias), -1, size)
            seen = cache[rows, :, :width].flatten(0, 1)
            keys, values = seen[..., :size], seen[..., size:]
            scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=weights.scale)
            output = torch.bmm(scores.softmax(-1), values)
            output = output.view(num_pieces, kv_heads, groups, longest, size)
            output = output.permute(0, 3, 1, 2, 4).reshape(num_pieces * longest, -1)
            return output if place_N is None else output[place_N]

        return attend

    def _hidden(
        self,
        token_ids_N: torch.Tensor,
        rows_N: torch.Tensor,
        positions_N: torch.Tensor,
        attend: _Attend,
    ) -> torch.Tensor:
        """Return the last hidden states [N, size] of tokens, whose keys and values are cached."""
        weights, capacity = self._weights, self._capacity
        num_heads, num_kv_heads, size = weights.num_heads, weights.num_kv_heads, weights.head_size
        cos_N1D, sin_N1D = self._cos_C1D[positions_N], self._sin_C1D[positions_N]
        places = (rows_N * (num_kv_heads * capacity) + positions_N)[:, None]
        places = (places + torch.arange(num_kv_heads) * capacity).flatten()  # [N * K]
        hidden = embedding(token_ids_N, weights.embedding)
        for layer, cache in zip(weights.layers, self._cache, strict=True):
            qkv = layer.qkv(self._normed(hidden, layer.attention_norm)).view(len(hidden), -1, size)
            qk, values = qkv.tensor_split([num_heads + num_kv_heads], dim=1)
            if layer.qk_norm is not None:
                qk = self._normed(qk, layer.qk_norm)
            qk = torch.addcmul(qk * cos_N1D, qk.roll(size // 2, -1), sin_N1D)
            queries, keys = qk.tensor_split([num_heads], dim=1)
            new = torch.cat([keys, values.float()], dim=-1).view(-1, 2 * size)
            cache.view(-1, 2 * size).index_copy_(0, places, new)
            hidden = hidden + layer.output(attend(queries, cache))
            gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(layer.activation(gate).mul_(up))
        return self._normed(hidden, weights.norm)

    def _normed(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalize by the root mean square, rounding where transformers does."""
        exact = rms_norm(values.float(), values.shape[-1:], None, self._weights.eps)
        return weight * exact.to(values.dtype)


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """Return float32 zeros in a mapping of their own, which ends with the tensor.

    malloc would keep the memory of each smaller cache, for each thread, after the cache has grown.
    """
    num_values = math.prod(shape)
    if not num_values:
        return torch.zeros(shape)
    mapping = mmap.mmap(-1, 4 * num_values, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.float32).view(shape)


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
