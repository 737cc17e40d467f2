"""Links between the learner's memory and one server, over which all weights are sent.

A link has two ends that work at the same time: `send` in torch's thread, and `take` on the event
loop, which tells the server what comes. Over gloo, both ends are ours; `nccl.py` and `ipc.py` speak
to vLLM's own weight transfer, and send weights in chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import weights_limit_s
from openenv_pipe.engines.vllm.inside.openenv_pipe_broadcast import Sender

CHUNK_BYTES = 256 * 2**20  # sent at a time; a chunk is larger by at most its last tensor
LONGEST_WAIT = timedelta(seconds=60)  # of one end for the other


@dataclass(kw_only=True, slots=True)
class Chunk:
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

    vLLM's NCCL receiver follows the same rule, so that both ends agree on the chunks.
    """
    chunks = [Chunk()]
    for name, tensor in weights.items():
        if chunks[-1].num_bytes > chunk_bytes:
            chunks.append(Chunk())
        chunks[-1].add(name, tensor)
    return chunks


def buffer_for(chunks: Sequence[Chunk], device: torch.device) -> torch.Tensor:
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


class TransferError(RuntimeError):
    """Weights cannot be sent, for the reason in the message."""


class Link(Protocol):
    """The connection to one server. After an error it is closed, and another one is made.

    The weights' names, types and shapes are the same each time, and all are on one device.
    """

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Send weights, and block until the server has them. Raises RuntimeError."""

    async def take(
        self, client: VllmClient, weights: Mapping[str, torch.Tensor], version: str
    ) -> None:
        """Make the server receive what `send` sends, as this version; after `close`, nothing.

        weights: only their names, types and shapes are read.

        Raises EngineError and ServerGoneError.
        """

    async def leave(self, client: VllmClient) -> None:
        """Make the server disconnect, because it keeps running after the run."""

    def close(self) -> None:
        """Disconnect, and end all waits of this process. Any thread may call it, repeatedly.

        A server that waits for NCCL's next message does not notice, and waits until it is ended.
        """


class GlooLink:
    """A link between CPUs of one machine: both ends are of `inside/openenv_pipe_broadcast.py`."""

    def __init__(self, meeting: Path) -> None:
        """meeting: the path of a new file, in a folder that the server's workers can write."""
        self._sender = Sender(meeting)
        self._has_joined = False

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._sender.send(weights)

    async def take(
        self, client: VllmClient, weights: Mapping[str, torch.Tensor], version: str
    ) -> None:
        if not self._has_joined:
            await client.join_broadcast(self._sender.meeting)
            self._has_joined = True
        everything = Chunk()
        for name, tensor in weights.items():
            everything.add(name, tensor)
        await client.receive_weights(version, weights_limit_s(everything.num_bytes))

    async def leave(self, client: VllmClient) -> None:
        await client.leave_broadcast()

    def close(self) -> None:
        self._sender.close()
