"""Forward passes for sampling: rows of tokens, whose keys and values are cached.

The rows of `RaggedCache` are conversations that grow at different rates. Row r holds its tokens at
positions 0..length-1. A forward pass writes Q tokens per row at that row's own positions. If a row
has fewer, the rest is padding, which is written after its end and overwritten by its next tokens.
A query sees position j only if j is not after its own, so it never sees padding.

Shape letters: R rows, Q new tokens of a forward pass, K keys of a row, C capacity of a row in
tokens, H key-value heads, D head size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from openenv_pipe.registry import extras, load
from openenv_pipe.types import NO_IMAGES, Images

if TYPE_CHECKING:
    from openenv_pipe.models.policy import Policy

_GROWTH = 64  # tokens; capacity grows in steps, so that rows are seldom copied
Rows = Sequence[Sequence[int]]  # token ids of each row


class Sampler(StrEnum):
    """The forward passes for sampling, fastest first. `forward_check` chooses one by measuring."""

    FAST = "fast"  # what an extra brings
    RAGGED = "ragged"  # the model's modules, with a cache in which rows grow at different rates
    PLAIN = "plain"  # the model's own forward pass and cache; each turn computes its row again
    PLAIN_EQUAL = "plain, rows of equal length"  # the same, without padding
    WHOLE = "whole rows"  # no cache: each token computes its row again


class RowForward(Protocol):
    """A forward pass over the rows of its own cache. A row's tokens are fed in their order."""

    def reserve_rows(self, num_rows: int) -> None:
        """Make room for at least `num_rows` rows."""

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Overwrite the target rows with the source rows as they were before the call."""

    def feed(
        self, new_ids: Rows, starts: Sequence[int], images: Images = NO_IMAGES
    ) -> torch.Tensor:
        """Feed to each row r its new tokens, at least one, from position starts[r] on.

        images: those in the new tokens, for a vision-language model.

        Returns the logits [R, V] after each row's last token.
        """

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Feed one token to each of the first R rows; return the logits [R, V] after it."""


class FastSampling:
    """`Sampler.FAST`: this class samples no model; subclasses sample those that they support."""

    def unsupported_reason(self, model: Any, decoder: Any) -> str | None:
        """Return why this model cannot be sampled by it; None if it can."""
        return "no extra brings it"

    def forwards(
        self, decoder: Any, head: Any, precision: torch.dtype, num: int
    ) -> list[RowForward]:
        """Return passes with a copy of the current weights, and with empty caches."""
        raise NotImplementedError


def fast_sampling() -> FastSampling:
    """Return what an extra brings."""
    kinds = [load(extra.fast_sampling) for extra in extras() if extra.fast_sampling]
    kind: type[FastSampling] = kinds[0] if kinds else FastSampling
    return kind()


@dataclass(frozen=True, slots=True)
class Reach:
    """The earlier tokens that one kind of layer attends to."""

    window: int | None = None  # in tokens, the query's own included; None: any number
    chunk: int | None = None  # in positions; a query sees its own chunk only; None: no chunks

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


@dataclass(slots=True)
class _Layout:
    """What all layers of a cache share: its size, and where the current forward pass writes.

    Layers hold this and not their cache: a reference cycle would keep the tensors of a cache
    that nobody uses any more until Python's garbage collector finds it.
    """

    num_rows: int = 0
    capacity: int = 0  # tokens of a row
    width: int = 0  # tokens of a row that the current forward pass may look at
    places: tuple[torch.Tensor, torch.Tensor] | None = None  # its rows [R, 1], positions [R, Q]


class _RaggedLayer(CacheLayerMixin):
    """One layer's keys and values, [R, C, H, D], written at the cache's current positions."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, layout: _Layout) -> None:
        super().__init__()
        self._layout = layout

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room. Multi-head latent attention has values of another size than its keys."""
        rows = self._layout.num_rows, self._layout.capacity
        self.keys, self.values = (
            states.new_zeros((*rows, states.shape[1], states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [R, H, Q, D] and return all that a query may look at, [R, H, width, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places, width = self._layout.places, self._layout.width
        self.keys[places] = key_states.transpose(1, 2)
        self.values[places] = value_states.transpose(1, 2)
        rows = len(key_states)
        seen = slice(rows), slice(width)
        return self.keys[seen].transpose(1, 2), self.values[seen].transpose(1, 2)

    def resize(self, rows: int, capacity: int) -> None:
        """Grow to more rows or a larger capacity; the content stays."""
        if self.is_initialized:
            self.keys = _grown(self.keys, rows, capacity)
            self.values = _grown(self.values, rows, capacity)

    def copy_rows(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys[targets], self.values[targets] = self.keys[sources], self.values[sources]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._layout.width, 0

    def get_seq_length(self) -> int:
        return self._layout.width

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """A transformers cache whose rows have their own lengths. Rows can be added and copied."""

    layers: list[Any]  # of _RaggedLayer; the base class declares other kinds of layers

    def __init__(self, num_layers: int) -> None:
        self._layout = _Layout()
        super().__init__(layers=[_RaggedLayer(self._layout) for _ in range(num_layers)])

    @property
    def capacity(self) -> int:
        """Tokens that each row has room for."""
        return self._layout.capacity

    def write_at(self, positions_RQ: torch.Tensor) -> torch.Tensor:
        """Prepare a forward pass of the first R rows.

        Returns its attention mask [R, 1, Q, width], True = visible.
        """
        width = int(positions_RQ.max()) + 1
        if width > self.capacity:
            self._resize(self._layout.num_rows, -(-width // _GROWTH) * _GROWTH)
        rows_R1 = torch.arange(len(positions_RQ), device=positions_RQ.device)[:, None]
        self._layout.width, self._layout.places = width, (rows_R1, positions_RQ)
        columns = torch.arange(width, device=positions_RQ.device)
        return (columns <= positions_RQ[:, :, None])[:, None]

    def reserve_rows(self, num_rows: int) -> None:
        """Make room for at least `num_rows` rows."""
        if num_rows > self._layout.num_rows:
            self._resize(num_rows, self.capacity)

    def copy_rows(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Overwrite the target rows [K] with the source rows [K] as they were before the call."""
        for layer in self.layers:
            layer.copy_rows(sources, targets)

    def _resize(self, num_rows: int, capacity: int) -> None:
        for layer in self.layers:
            layer.resize(num_rows, capacity)
        self._layout.num_rows, self._layout.capacity = num_rows, capacity


def _grown(tensor: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    grown = tensor.new_zeros((rows, capacity, *tensor.shape[2:]))
    grown[: tensor.shape[0], : tensor.shape[1]] = tensor
    return grown


class TransformersForward:
    """The forward pass of transformers' own modules, for attention to earlier tokens."""

    def __init__(self, model: "Policy") -> None:
        self._model = model
        self._cache = RaggedCache(model.num_layers)

    def reserve_rows(self, num_rows: int) -> None:
        self._cache.reserve_rows(num_rows)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._cache.copy_rows(self._tensor(sources), self._tensor(targets))

    def feed(
        self, new_ids: Rows, starts: Sequence[int], images: Images = NO_IMAGES
    ) -> torch.Tensor:
        assert not images, "this model reads text alone"
        return self._forward(*self._in_rows(new_ids, starts))

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        return self._forward(token_ids_R[:, None], positions_R[:, None], positions_R.new_zeros(1))

    def _in_rows(
        self, new_ids: Rows, starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return padded ids [R, Q], their places in the cache, and each row's last one [R]."""
        width = max(map(len, new_ids))
        ids_RQ = self._tensor([[*ids, *[0] * (width - len(ids))] for ids in new_ids])
        places_RQ = self._tensor(starts)[:, None] + self._tensor(range(width))
        return ids_RQ, places_RQ, self._tensor([len(ids) - 1 for ids in new_ids])

    def _forward(
        self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, last_R: torch.Tensor
    ) -> torch.Tensor:
        """Compute the logits [R, V] at each row's place last_R.

        Padding has the position of its row's last token, which may be the model's last position.
        """
        causal_R1QK = self._cache.write_at(positions_RQ)
        mask = layer_masks(self._model.reaches, causal_R1QK, positions_RQ)
        highest_R1 = positions_RQ[self._tensor(range(len(positions_RQ))), last_R][:, None]
        positions_RQ = torch.minimum(positions_RQ, highest_R1)
        hidden_RQ = self._model.hidden(ids_RQ, positions_RQ, mask, self._cache)
        return self._last_logits(hidden_RQ, last_R)

    def _last_logits(self, hidden_RQ: torch.Tensor, last_R: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden_RQ[self._tensor(range(len(hidden_RQ))), last_R])

    def _tensor(self, values: Sequence[int] | Rows) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)
