"""Send all weights by vLLM's weight transfer "nccl", to servers on GPUs of their own.

The learner has rank 0 of a group with all workers of one server, which may run on other machines.
It brings NCCL's unique id to them over HTTP. vLLM's own sender cannot be used: it would need vLLM
in the learner's environment.
"""

import asyncio
import base64
import contextlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

import torch
import torch.distributed as dist

from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import CALL_LIMIT_S, weights_limit_s
from openenv_pipe.extras.transfers.link import (
    CHUNK_BYTES,
    LONGEST_WAIT,
    Chunk,
    TransferError,
    buffer_for,
    device_of,
    divide,
    fill,
)

UNIQUE_ID_KEY = "0"  # of a group's first communicator in its store, see broadcastUniqueNCCLID


class NcclLink:
    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._store.set_timeout(LONGEST_WAIT)
        self._num_workers: Future[int] = Future()
        self._group: Any = None  # torch's types lack the methods of its NCCL backend
        self._has_joined = False  # the server
        self._is_closed = False

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        device = device_of(weights)
        if self._group is None:
            self._connect(device)
        chunks = divide(weights, CHUNK_BYTES)
        buffer = buffer_for(chunks, device)
        for chunk in chunks:
            group = self._group
            if group is None:
                raise TransferError("this end is closed")
            part = fill(buffer, chunk, weights)
            group.broadcast(part, 0, LONGEST_WAIT).wait(LONGEST_WAIT)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    async def take(
        self, client: VllmClient, weights: Mapping[str, torch.Tensor], version: str
    ) -> None:
        if not self._has_joined:
            await client.check_transfer("nccl", nccl_version())
            num_workers = await client.num_workers()
            with contextlib.suppress(InvalidStateError):  # this link was closed meanwhile
                self._num_workers.set_result(num_workers)
            unique_id = await asyncio.to_thread(self._store.get, UNIQUE_ID_KEY)
            if self._is_closed:
                return
            await client.end_transfer()  # of an earlier run, whose group it would keep
            await client.begin_transfer(init_info(unique_id, num_workers))
            self._has_joined = True
        everything = Chunk()
        for name, tensor in weights.items():
            everything.add(name, tensor)
        if self._is_closed:
            return
        await client.start_weight_update()
        limit_s = weights_limit_s(everything.num_bytes)
        await client.update_weights(everything.described(), limit_s)
        await client.finish_weight_update(version)

    async def leave(self, client: VllmClient) -> None:
        await client.end_transfer()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(InvalidStateError):  # it is known already
            self._num_workers.set_exception(TransferError("the server has not connected"))
        self._store.set(UNIQUE_ID_KEY, "")  # ends a wait for it
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # the group may have failed already
                group.abort()

    def _connect(self, device: torch.device) -> None:
        limit_s = 2 * CALL_LIMIT_S
        try:
            num_workers = self._num_workers.result(limit_s)
        except TimeoutError:
            raise TransferError(f"the server did not connect within {limit_s:g} s") from None
        group = self._group = nccl_group(self._store, 1 + num_workers)
        # vLLM's workers begin with this sum, for which NCCL connects all ranks.
        group.allreduce(torch.zeros(1, device=device), timeout=LONGEST_WAIT).wait(LONGEST_WAIT)


def init_info(unique_id: bytes, num_workers: int) -> dict[str, str | int | bool]:
    """Return what the server's workers need to connect, and the rule of `divide`."""
    return {
        "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
        "rank_offset": 1,
        "world_size": 1 + num_workers,
        "packed": True,
        "packed_buffer_size_bytes": CHUNK_BYTES,
    }


def nccl_version() -> str:
    """Return the version of the learner's NCCL. With two versions, both ends would wait."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def nccl_group(store: dist.Store, size: int) -> Any:
    """Make rank 0 of a group in which connecting can be aborted, as in torchft, and timeouts raise.

    With blocking waits, torch's watchdog does not end the process after a timeout.
    """
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(LONGEST_WAIT.seconds))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LONGEST_WAIT
    options.config.blocking = 0
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # only the constructor reads it
    try:
        return dist.ProcessGroupNCCL(store, 0, size, options)
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before
