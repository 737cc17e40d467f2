"""Keys and values of rows of tokens that grow at different rates, for a fast forward pass.

Shape letters: R rows, K key-value heads, C capacity of a row in tokens, D head size, N tokens.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

# tokens; then capacity doubles, so that copies are few. Were it a power of two, a pass would look
# for the tokens of all rows in the same places of the processor's cache.
MIN_CAPACITY = 544


class RowStore:
    """The keys and the values of each layer, [R, K, C, D].

    They are apart, because a pass that reads only one of them loads no memory of the other.
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
            for number in range(self._num_layers):  # so that only one layer is there twice
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
