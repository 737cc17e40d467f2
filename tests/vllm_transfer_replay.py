"""Replays requests of our weight transfer against vLLM's own code, in vLLM's Python environment.

    python vllm_transfer_replay.py BACKEND CHUNK_BYTES < requests.json

Paths are those of vLLM's router, and bodies become its own request objects. Receiving itself needs
a GPU, so a stub in place of the group of NCCL reports how many bytes vLLM's receiver expects at a
time. The result is written to stdout as JSON.
"""

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import openenv_pipe_worker
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.rl.online.api_router import router
from vllm.utils.argparse_utils import FlexibleArgumentParser

ENGINES = {"nccl": NCCLWeightTransferEngine, "ipc": IPCWeightTransferEngine}


class Stream:
    """In place of a CUDA stream."""

    def synchronize(self) -> None:
        """Do nothing."""


class Replayed:
    """In place of vLLM's engine client, and of a worker."""

    def __init__(self, backend: str, chunk_bytes: int) -> None:
        self.engine = object.__new__(ENGINES[backend])
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        argument = json.dumps({"backend": backend})
        config = parser.parse_args(["--weight-transfer-config", argument]).weight_transfer_config
        config = SimpleNamespace(**config) if isinstance(config, dict) else config
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=config,
            parallel_config=SimpleNamespace(world_size=2, world_size_across_dp=2),
        )
        self.device = torch.device("cpu")
        self.chunk_bytes = chunk_bytes
        self.expected: list[int] = []  # bytes of each broadcast
        self.handles: list[list[Any]] = []  # arguments that open a shared buffer
        self.version: str | None = None

    async def init_weight_transfer_engine(self, request: Any) -> None:
        info = self.engine.parse_init_info(request.init_info)
        if isinstance(self.engine, NCCLWeightTransferEngine):
            assert info.nccl_unique_id_bytes == bytes(range(128))
            assert (info.rank_offset, info.world_size) == (1, 3)
            assert info.packed_buffer_size_bytes == self.chunk_bytes
        assert info.packed

    async def shutdown_weight_transfer_engine(self) -> None:
        """As vLLM's worker: the engine has no group yet, which does no harm."""
        self.engine.model_update_group = None
        self.engine.shutdown()

    async def start_weight_update(self) -> None:
        """Do nothing."""

    async def update_weights(self, request: Any) -> None:
        info = self.engine.parse_update_info(request.update_info)
        metas = zip(info.names, info.dtype_names, info.shapes, strict=True)
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, dtype, shape in metas),
            group=SimpleNamespace(broadcast=lambda it, src: self.expected.append(it.numel())),
            src=0,
            post_unpack_func=lambda weights: None,
            buffer_size_bytes=self.chunk_bytes,
            device="cpu",
        )

    async def finish_weight_update(self, weight_version: str | None) -> None:
        self.version = weight_version

    def receive(self, update: dict[str, Any]) -> None:
        """As vLLM's worker does for IPC, up to the opening of the buffer."""
        info = self.engine.parse_update_info(update)
        (arguments,) = info.ipc_handles.values()
        self.handles.append(arguments)

    def worker(self) -> Any:
        return SimpleNamespace(
            vllm_config=self.vllm_config, device=self.device, update_weights=self.receive
        )


def main() -> None:
    backend, chunk_bytes = sys.argv[1], int(sys.argv[2])
    packed_tensor._get_streams = lambda device, count: [Stream()] * count
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    openenv_pipe_worker.gpu_id = lambda device: "GPU-1"
    replayed = Replayed(backend, chunk_bytes)
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = replayed
    client, problems = TestClient(app), []
    for path, body in json.load(sys.stdin):
        if path == "/collective_rpc":
            method = getattr(openenv_pipe_worker.PolicyWorker, body["method"])
            problem = method(replayed.worker(), **body["kwargs"])["problem"]
        else:
            answer = client.post(path, json=body)
            problem = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text}"
        problems += [f"{path}: {problem}"] if problem else []
    world = client.get("/get_world_size").json()
    found = {"problems": problems, "world": world, "expected": replayed.expected}
    found |= {"version": replayed.version, "handles": [len(each) for each in replayed.handles]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
