"""A server in the test's process that takes weights as vLLM's own weight transfer does.

NCCL and CUDA IPC are replaced by queues and numbers; requests, order and bytes are the real ones.
"""

import asyncio
import json
import queue
from contextlib import asynccontextmanager
from typing import Any

import torch
from aiohttp import web

from openenv_pipe.engines.vllm.inside.openenv_pipe_ipc import BYTES, NUMBERS
from openenv_pipe.extras.transfers import ipc as transfer_ipc
from openenv_pipe.extras.transfers import nccl as transfer_nccl

UNIQUE_ID = bytes(range(128))
NUM_WORKERS = 2
LIMIT_S = 60.0


class TransferServer:
    """A server and the other end of its transfer."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []  # paths and bodies, in order
        self.received: dict[str, torch.Tensor] = {}
        self.rejects: str | None = None  # the path that answers with status 500
        self.problem = ""  # of the next call of the worker extension
        self.sent: queue.Queue[torch.Tensor | None] = queue.Queue()  # by NCCL; None: ends a wait
        self.buffers: dict[str, torch.Tensor] = {}  # on the "GPU", by their storage's handle

    @property
    def paths(self) -> list[str]:
        """The paths of requests, without queries; methods of the worker extension by name."""
        return [
            body["method"] if path == "/collective_rpc" else path.partition("?")[0]
            for path, body in self.requests
        ]

    @asynccontextmanager
    async def running(self):
        """Yield the server's URL."""
        app = web.Application()
        app.router.add_get("/get_world_size", self._world_size)
        app.router.add_get("/health", self._healthy)
        app.router.add_post("/{path}", self._post)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": NUM_WORKERS})

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _post(self, request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else None
        self.requests.append((request.path_qs, body))
        if request.path == self.rejects:
            return web.json_response({"error": "no such weight"}, status=500)
        if request.path == "/update_weights":
            try:
                await asyncio.to_thread(self._receive, body["update_info"])
            except RuntimeError as error:
                return web.json_response({"error": str(error)}, status=500)
        if request.path != "/collective_rpc":
            return web.json_response({})
        problem, self.problem = self.problem, ""
        if body["method"] == "receive_shared" and not problem:
            self._copy(**body["kwargs"])
        return web.json_response({"results": [{"problem": problem}]})

    def _receive(self, update: dict[str, Any]) -> None:
        """Receive weights over NCCL, packed by vLLM's rule: up to the first tensor beyond it."""
        metas = list(zip(*update.values(), strict=True))
        packed, size = [], 0
        for number, (name, dtype, shape) in enumerate(metas, 1):
            length = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            packed.append((name, dtype, shape, length))
            size += length
            if size > transfer_nccl.CHUNK_BYTES or number == len(metas):
                taken = self.sent.get(timeout=LIMIT_S)
                if taken is None:
                    raise RuntimeError("NCCL was aborted")
                self._unpack(taken, packed)
                packed, size = [], 0

    def _copy(self, chunk: dict[str, Any], buffer: dict[str, Any]) -> None:
        """Copy weights out of a shared buffer."""
        columns = [chunk[key] for key in ("names", "dtype_names", "shapes", "tensor_sizes")]
        taken = self.buffers[buffer["storage_handle"]][: sum(chunk["tensor_sizes"])].clone()
        self._unpack(taken, list(zip(*columns, strict=True)))

    def _unpack(self, packed: torch.Tensor, weights: list[tuple]) -> None:
        assert packed.numel() == sum(weight[3] for weight in weights)
        for name, dtype, shape, length in weights:
            part, packed = packed[:length], packed[length:]
            self.received[name] = part.clone().view(getattr(torch, dtype)).view(shape)


class _Group:
    """Rank 0 of a group, with the methods of torch's NCCL backend that are used."""

    def __init__(self, server: TransferServer, store: Any, size: int) -> None:
        assert size == 1 + NUM_WORKERS
        self._server = server
        store.set(transfer_nccl.UNIQUE_ID_KEY, UNIQUE_ID)

    def allreduce(self, tensor: torch.Tensor, timeout: Any) -> "_Group":
        assert tensor.dtype is torch.float32 and tensor.shape == (1,)
        return self

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: Any) -> "_Group":
        assert root == 0
        self._server.sent.put(tensor.clone())
        return self

    def wait(self, timeout: Any) -> None:
        """Wait for nothing: queues take everything at once."""

    def abort(self) -> None:
        """Do nothing: the server's workers would not notice, and wait on."""


def pretend_gpu(monkeypatch, server: TransferServer, chunk_bytes: int) -> None:
    """Replace what needs a GPU: the process group, and the description of a shared buffer."""
    for module in (transfer_nccl, transfer_ipc):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(transfer_nccl, "nccl_version", lambda: "2.29.7")
    monkeypatch.setattr(
        transfer_nccl, "nccl_group", lambda store, size: _Group(server, store, size)
    )

    def describe(buffer: torch.Tensor) -> dict[str, Any]:
        handle = len(server.buffers).to_bytes(64).hex()
        server.buffers[handle] = buffer
        handles = dict.fromkeys(BYTES, handle)
        return {"gpu": "GPU-1", "num_bytes": buffer.numel(), **handles, **dict.fromkeys(NUMBERS, 0)}

    monkeypatch.setattr(transfer_ipc, "describe", describe)
    monkeypatch.setattr(transfer_ipc, "gpu_id", lambda device: "GPU-1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
