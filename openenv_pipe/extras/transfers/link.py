"""Links between the learner's memory and one server, over which all weights are sent.

A link has two ends that work at the same time: `send` in torch's thread, and `take`, which tells
the server on the event loop what comes. Over gloo, both ends are ours; `nccl.py` and
`ipc.py` speak to vLLM's own weight transfer.
"""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.inside.openenv_pipe_broadcast import Sender

if TYPE_CHECKING:
    import torch

LONGEST_WAIT = timedelta(seconds=60)  # of one end for the other


class TransferError(RuntimeError):
    """Weights cannot be sent, for the reason in the message."""


class Link(Protocol):
    """The connection to one server. After an error it is closed, and another one is made.

    The weights' names, types and shapes are the same each time, and all are on one device.
    """

    def send(self, weights: "Mapping[str, torch.Tensor]") -> None:
        """Send weights, and block until the server has them. Raises RuntimeError."""

    async def take(
        self, client: VllmClient, weights: "Mapping[str, torch.Tensor]", version: str
    ) -> None:
        """Make the server receive what `send` sends, as this version; after `close`, nothing.

        weights: only their names, types and shapes are read.

        Raises EngineError and ServerGoneError.
        """

    async def leave(self, client: VllmClient) -> None:
        """Make the server disconnect, because it keeps running after the run."""

    def close(self) -> None:
        """Disconnect, and end all waits of this process. Any thread may call it, repeatedly.

        A server that waits for NCCL's next message does not notice; only its end helps it.
        """


class GlooLink:
    """A link between CPUs of one machine: both ends are of `inside/openenv_pipe_broadcast.py`."""

    def __init__(self, meeting: Path) -> None:
        """meeting: the path of a new file, in a folder that the server's workers can write."""
        self._sender = Sender(meeting)
        self._has_joined = False

    def send(self, weights: "Mapping[str, torch.Tensor]") -> None:
        self._sender.send(weights)

    async def take(
        self, client: VllmClient, weights: "Mapping[str, torch.Tensor]", version: str
    ) -> None:
        if not self._has_joined:
            await client.join_broadcast(self._sender.meeting)
            self._has_joined = True
        await client.receive_weights(version)

    async def leave(self, client: VllmClient) -> None:
        await client.leave_broadcast()

    def close(self) -> None:
        self._sender.close()
