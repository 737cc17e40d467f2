"""Send all weights by vLLM's weight transfer "ipc", to a server on the learner's own GPU.

The learner fills a buffer on the GPU, the server copies the weights out of it, and so on until it
has all of them. Nothing but descriptions leaves the GPU.
"""

import asyncio
import queue
from collections.abc import Mapping
from typing import Any

import torch

from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import CALL_LIMIT_S
from openenv_pipe.engines.vllm.inside.openenv_pipe_ipc import describe, gpu_id
from openenv_pipe.errors import EngineError
from openenv_pipe.extras.transfers.link import (
    CHUNK_BYTES,
    Chunk,
    TransferError,
    buffer_for,
    device_of,
    divide,
    fill,
)

LONGEST_CHUNK_S = 2 * CALL_LIMIT_S  # that one end waits for the other
Filled = tuple[Chunk, Mapping[str, Any]]  # and the description of the buffer that it is in


class IpcLink:
    def __init__(self) -> None:
        self._filled: queue.Queue[Filled | None] = queue.Queue()  # None: there are no more
        self._taken: queue.Queue[bool] = queue.Queue()  # False: this link is closed
        self._has_joined = False  # the server
        self._is_closed = False

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        chunks = divide(weights, CHUNK_BYTES)
        buffer = buffer_for(chunks, device_of(weights))
        described = describe(buffer)
        for chunk in chunks:
            fill(buffer, chunk, weights)
            torch.cuda.synchronize(buffer.device)
            self._hand_over((chunk, described))
        self._hand_over(None)
        del buffer
        torch.cuda.ipc_collect()  # the server has closed it

    async def take(
        self, client: VllmClient, weights: Mapping[str, torch.Tensor], version: str
    ) -> None:
        if not self._has_joined:
            await client.check_transfer("ipc", gpu_id(device_of(weights)))
            await client.begin_transfer({"packed": True})
            self._has_joined = True
        await client.start_weight_update()
        while (filled := await self._next()) is not None:
            chunk, described = filled
            sizes = {"tensor_sizes": chunk.tensor_sizes}
            await client.load_shared(chunk.described() | sizes, described)
            self._taken.put(True)
        if self._is_closed:
            return  # `send` says why
        await client.finish_weight_update(version)
        self._taken.put(True)

    async def leave(self, client: VllmClient) -> None:
        """Do nothing: the server has closed the buffer."""

    def close(self) -> None:
        self._is_closed = True
        self._filled.put(None)
        self._taken.put(False)

    async def _next(self) -> Filled | None:
        try:
            return await asyncio.to_thread(self._filled.get, timeout=LONGEST_CHUNK_S)
        except queue.Empty:
            raise EngineError(
                f"the learner has filled no buffer with weights for {LONGEST_CHUNK_S:g} s"
            ) from None

    def _hand_over(self, filled: Filled | None) -> None:
        """Give the server's end a chunk, and wait until the server has copied it."""
        self._filled.put(filled)
        try:
            is_open = self._taken.get(timeout=LONGEST_CHUNK_S)
        except queue.Empty:
            is_open = False
        if not is_open:
            raise TransferError(
                "the server has closed the transfer, or has not copied a chunk of the weights "
                f"within {LONGEST_CHUNK_S:g} s"
            )
