"""Keys and values of conversations that grow at different rates.

Shape letters: R rows (conversations), C capacity in tokens, Q new tokens of a forward pass,
H key-value heads, D head size.

Row r holds its tokens at positions 0..length-1. A forward pass writes Q tokens per row at that
row's own positions. If a row has fewer, the rest is padding, which is written behind its end and
overwritten by its next tokens. A query sees position j only if j is not after its own, so it never
sees padding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 64  # tokens; capacity grows in steps, so that rows are seldom copied


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
        """Make room for at least so many rows."""
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
