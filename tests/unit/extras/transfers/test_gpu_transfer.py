"""Sending weights between GPUs, and between processes on one; skipped without a GPU.

Only CUDA can make the handles of IPC, and only two GPUs can connect over NCCL. Run by
`benchmarks/gpu_acceptance.py`, which also publishes to a real vLLM server.
"""

import asyncio
import base64
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from openenv_pipe.engines.vllm.inside.openenv_pipe_ipc import describe
from openenv_pipe.extras.transfers.link import divide
from openenv_pipe.extras.transfers.nccl import NcclLink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT_S = 300.0
OPEN_BUFFER = """
import json, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from openenv_pipe.engines.vllm.inside.openenv_pipe_ipc import rebuild_arguments
opened = rebuild_cuda_tensor(*rebuild_arguments(json.load(sys.stdin)))
print(json.dumps(opened.cpu().tolist()))
"""
# The other end, as vLLM's worker: the sum that connects, then a broadcast for each chunk.
RECEIVE = """
import json, sys, torch, torch.distributed as dist
given = json.load(sys.stdin)
store = dist.HashStore()
store.set("0", bytes.fromhex(given["unique_id"]))
device = torch.device("cuda:1")
torch.cuda.set_device(device)
group = dist.ProcessGroupNCCL(store, 1, 2, dist.ProcessGroupNCCL.Options())
group.allreduce(torch.zeros(1, device=device)).wait()
parts = []
for size in given["sizes"]:
    part = torch.empty(size, dtype=torch.uint8, device=device)
    group.broadcast(part, 0).wait()
    parts.append(part.cpu())
print(json.dumps(torch.cat(parts).tolist()))
"""


def in_a_process(program: str, given: dict) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_reads_a_described_buffer():
    buffer = torch.arange(200, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert in_a_process(OPEN_BUFFER, describe(buffer)) == buffer.tolist()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_another_gpu_receives_all_weights():
    weights = {"a": torch.arange(6.0, device="cuda"), "b": torch.ones(3, device="cuda")}
    received: list[int] = []

    class Client:
        async def check_transfer(self, backend: str, learner: str) -> None:
            assert backend == "nccl"

        async def num_workers(self) -> int:
            return 1

        async def begin_transfer(self, info: dict) -> None:
            sizes = [chunk.num_bytes for chunk in divide(weights, info["packed_buffer_size_bytes"])]
            unique_id = base64.b64decode(info["nccl_unique_id_b64"]).hex()
            given = {"unique_id": unique_id, "sizes": sizes}
            received.extend(await asyncio.to_thread(in_a_process, RECEIVE, given))

        async def start_weight_update(self) -> None:
            """Do nothing: the process receives as soon as it is connected."""

        async def end_transfer(self) -> None:
            """Do nothing."""

        async def update_weights(self, info: dict, limit_s: float) -> None:
            """Do nothing."""

        async def finish_weight_update(self, version: str) -> None:
            """Do nothing."""

    link = NcclLink()
    with ThreadPoolExecutor(1) as executor:
        sending = asyncio.get_running_loop().run_in_executor(executor, link.send, weights)
        await asyncio.gather(sending, link.take(Client(), weights, "1"))
    link.close()
    sent = torch.cat([each.view(torch.uint8) for each in weights.values()])
    assert received == sent.tolist()
