"""Put a policy's weights into chunks of bytes, as vLLM's own weight transfer expects them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

CHUNK_BYTES = 256 * 2**20  # sent at a time; a chunk is larger by at most its last tensor


@dataclass(kw_only=True, slots=True)
class Chunk:
    """Weights that are sent together, in their order."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    tensor_sizes: list[int] = field(default_factory=list)  # bytes

    @property
    def num_bytes(self) -> int:
        return sum(self.tensor_sizes)

    def described(self) -> dict[str, Any]:
        return {"names": self.names, "dtype_names": self.dtype_names, "shapes": self.shapes}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take note of a tensor, which may be one that is gathered later."""
        self.names.append(name)
        self.dtype_names.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(list(tensor.shape))
        self.tensor_sizes.append(tensor.dtype.itemsize * tensor.shape.numel())


def divide(weights: Mapping[str, torch.Tensor], chunk_bytes: int) -> Sequence[Chunk]:
    """Divide weights into chunks, each of which ends when it exceeds `chunk_bytes`.

    vLLM's receiver of NCCL follows the same rule, so that both ends agree on the chunks.
    """
    chunks = [Chunk()]
    for name, tensor in weights.items():
        if chunks[-1].num_bytes > chunk_bytes:
            chunks.append(Chunk())
        chunks[-1].add(name, tensor)
    return chunks


def buffer_for(chunks: Sequence[Chunk], device: torch.device) -> torch.Tensor:
    """Return a buffer of bytes that holds any of the chunks."""
    size = max(chunk.num_bytes for chunk in chunks)
    return torch.empty(size, dtype=torch.uint8, device=device)


def fill(buffer: torch.Tensor, chunk: Chunk, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Copy a chunk's weights into the buffer, and return the part that they take.

    A sharded policy gathers each tensor when its turn has come.
    """
    begin = 0
    for name, size in zip(chunk.names, chunk.tensor_sizes, strict=True):
        tensor = whole(weights[name])
        buffer[begin : begin + size].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        begin += size
    return buffer[:begin]


def whole(tensor: Any) -> torch.Tensor:
    """Return a tensor of the policy, gathered from all ranks if it is sharded."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()


def device_of(weights: Mapping[str, torch.Tensor]) -> torch.device:
    return next(iter(weights.values())).device
