"""Sending weights by vLLM's own transfer: requests and bytes, against a server in this process, and
against vLLM's own code where vLLM is installed."""

import asyncio
import base64
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm_transfer import NUM_WORKERS, UNIQUE_ID, TransferServer, pretend_gpu

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm.build import build_transfer
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.inside import openenv_pipe_ipc as ipc
from openenv_pipe.engines.vllm.installed import find_build, find_installed, python_path
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.publish_mode import transfer_backend
from openenv_pipe.engines.vllm.server_command import ServerSpec, server_arguments
from openenv_pipe.engines.vllm.versions import Versions
from openenv_pipe.errors import EngineError, RankLostError
from openenv_pipe.extras.transfers import build as transfer_build
from openenv_pipe.extras.transfers.link import divide

PATIENCE_S = 60.0
CHUNK_BYTES = 64
TRANSFERS = {"nccl": "broadcast", "ipc": "ipc"}  # by vLLM's name
CACHES = ["/reset_prefix_cache", "/reset_encoder_cache", "/resume"]
REPLAY = Path(__file__).parents[3] / "vllm_transfer_replay.py"


class Gathered:
    """A sharded tensor, which becomes whole when its turn has come."""

    def __init__(self, values: torch.Tensor, log: list[str], name: str) -> None:
        self.dtype, self.shape, self.device = values.dtype, values.shape, values.device
        self._values, self._log, self._name = values, log, name

    def full_tensor(self) -> torch.Tensor:
        self._log.append(self._name)
        return self._values


class Source:
    """A policy whose weights make three chunks."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.whole = {
            "embed": torch.randn(4, 3, generator=numbers),
            "norm": torch.arange(6.0).reshape(2, 3).T,
            "short": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "head": torch.nn.Parameter(torch.randn(5, 5, generator=numbers)),
            "number": torch.tensor(7),
        }
        self.gathered: list[str] = []
        self.failure: Exception | None = None

    def tensors(self):
        if self.failure is not None:
            raise self.failure
        return {
            name: Gathered(values, self.gathered, name) if name == "head" else values
            for name, values in self.whole.items()
        }


def engine_config(backend: str, *overrides: str):
    transfer = f"engine.weight_transfer={TRANSFERS[backend]}"
    return compose(["conf=smoke", "engine=vllm", transfer, *overrides]).config.engine


@pytest.fixture(params=["nccl", "ipc"])
def backend(request) -> str:
    return request.param


@pytest.fixture
async def parts(backend, tmp_path, monkeypatch):
    """A server, its client, the policy and its versions."""
    server, source = TransferServer(), Source()
    pretend_gpu(monkeypatch, server, CHUNK_BYTES)
    with ThreadPoolExecutor(1) as executor:
        config = engine_config(backend)
        transfer = build_transfer(config, "full", source, tmp_path, executor, backend)
        async with (
            server.running() as url,
            VllmClient(url, api_key=None, request_timeout_s=PATIENCE_S) as client,
        ):
            yield server, client, source, Versions(transfer, Owner.new("a test"), "run")
        transfer.close()


async def publish(versions, client, step: int) -> None:
    versions.transfer.begin_update()
    version = await versions.adopt(step, np.zeros((1, 1)))
    async with asyncio.timeout(PATIENCE_S):
        await versions.transfer.send(client, version, paused=False)


def assert_equal(received, source: Source) -> None:
    assert list(received) == list(source.whole)
    for name, sent in source.whole.items():
        assert received[name].dtype == sent.dtype
        torch.testing.assert_close(received[name], sent.detach(), rtol=0, atol=0)


async def test_a_server_gets_each_version_by_the_documented_requests(parts, backend):
    server, client, source, versions = parts
    await publish(versions, client, 0)
    assert_equal(server.received, source)
    first = server.paths
    server.requests.clear()
    source.whole["embed"] += 1.0
    await publish(versions, client, 1)
    assert_equal(server.received, source)
    update = ["/update_weights"] if backend == "nccl" else 3 * ["receive_shared"]
    changing = ["/start_weight_update", *update, "/finish_weight_update"]
    assert server.paths == ["/pause", *changing, *CACHES]
    leaving = ["/shutdown_weight_transfer_engine"] if backend == "nccl" else []
    joining = ["check_transfer", *leaving, "/init_weight_transfer_engine"]  # once
    assert first == ["/pause", *joining, *changing, *CACHES]
    bodies = dict(server.requests)
    label = versions.owner.label(1)
    assert bodies["/finish_weight_update"] == {"weight_version": label}
    assert source.gathered == ["head", "head"]  # once each time, when it was sent


async def test_what_connects_the_two_ends(parts, backend):
    server, client, _, versions = parts
    await publish(versions, client, 0)
    given = dict(server.requests)["/init_weight_transfer_engine"]["init_info"]
    if backend == "ipc":
        assert given == {"packed": True}
        return
    assert base64.b64decode(given.pop("nccl_unique_id_b64")) == UNIQUE_ID
    assert given == {
        "rank_offset": 1,
        "world_size": 1 + NUM_WORKERS,
        "packed": True,
        "packed_buffer_size_bytes": CHUNK_BYTES,
    }


async def test_a_server_that_cannot_receive_is_left_as_it_is(parts):
    server, client, source, versions = parts
    server.problem = "another GPU"
    with pytest.raises(EngineError, match=r"check_transfer at .*: another GPU"):
        await publish(versions, client, 0)
    assert server.paths == ["/pause", "check_transfer", "/resume"]
    await publish(versions, client, 1)
    assert_equal(server.received, source)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/init_weight_transfer_engine", "/resume"),
        ("/finish_weight_update", "/finish_weight_update"),
    ],
)
async def test_a_rejected_update_is_told(parts, path, last):
    """The next publish connects anew. A server with parts of two versions is left paused."""
    server, client, source, versions = parts
    server.rejects = path
    with pytest.raises(EngineError, match=f"{path} answered with status 500.*no such weight"):
        await publish(versions, client, 0)
    assert server.paths[-1] == last
    server.rejects = None
    server.sent.queue.clear()
    await publish(versions, client, 1)
    assert server.paths.count("check_transfer") == 2
    assert server.paths[-1] == "/resume"
    assert_equal(server.received, source)


async def test_a_learner_that_fails_is_told(parts, monkeypatch):
    server, client, source, versions = parts
    source.failure = RuntimeError("CUDA error")
    with pytest.raises(EngineError, match=r"cannot be sent to .*: CUDA error"):
        await publish(versions, client, 0)
    assert server.paths == ["/pause", "/resume"]


@pytest.mark.parametrize("error", [RuntimeError("no memory is left"), RankLostError("rank 1")])
async def test_a_learner_that_fails_while_it_sends_is_told(parts, monkeypatch, error):
    """The server's workers go on waiting for NCCL, so that its answer does not come."""
    server, client, _, versions = parts

    def fail(self) -> None:
        raise error

    monkeypatch.setattr(Gathered, "full_tensor", fail)
    monkeypatch.setattr(transfer_build, "REASON_LIMIT_S", 0.2)
    expected = RankLostError if isinstance(error, RankLostError) else EngineError
    try:
        with pytest.raises(expected, match=str(error)):
            await publish(versions, client, 0)
    finally:
        server.sent.put(None)
    assert not versions.transfer._links


async def test_an_old_version_cannot_be_sent(parts):
    """Only the learner's current weights are in its memory."""
    server, client, _, versions = parts
    old = await versions.adopt(0, np.zeros((1, 1)))
    versions.transfer.begin_update()
    with pytest.raises(EngineError, match="version 0 has left the learner's memory"):
        await versions.transfer.send(client, old, paused=True)
    assert server.paths == []


async def test_a_server_that_runs_on_is_left(parts, backend):
    server, client, _, versions = parts
    await publish(versions, client, 0)
    server.requests.clear()
    await versions.withdraw(client)
    assert server.paths == (["/shutdown_weight_transfer_engine"] if backend == "nccl" else [])


def test_chunks_end_with_the_tensor_that_exceeds_them():
    weights = {str(n): torch.zeros(n, dtype=torch.uint8) for n in (3, 4, 5, 1, 9, 2)}
    chunks = divide(weights, 6)
    assert [chunk.tensor_sizes for chunk in chunks] == [[3, 4], [5, 1, 9], [2]]
    assert [chunk.num_bytes for chunk in chunks] == [7, 15, 2]


def test_only_servers_on_gpus_are_told_to_receive():
    known = {"model": "/m", "revision": None, "dtype": "bfloat16", "lora_rank": 0}
    for name in TRANSFERS:
        config = engine_config(name)
        assert transfer_backend(config, "full", "cuda") == name
        assert transfer_backend(config, "full", "cpu") is None
        spec = ServerSpec(**known, build="cuda", transfer_backend=name)
        arguments = server_arguments(spec, config, "h", 1)
        where = arguments.index("--weight-transfer-config")
        assert json.loads(arguments[where + 1]) == {"backend": name}
    plain = server_arguments(ServerSpec(**known, build="cuda"), config, "h", 1)
    assert "--weight-transfer-config" not in plain


def test_a_described_buffer_is_opened_by_torch_s_own_arguments(monkeypatch):
    """Handles themselves can be made only on CUDA."""
    names = list(ipc.REBUILD.parameters)
    given = {name: bytes([number]) * 64 for number, name in enumerate(ipc.BYTES)}
    given |= {name: number for number, name in enumerate(ipc.NUMBERS)}
    arguments = [given.get(name) for name in names]
    monkeypatch.setattr(ipc, "reduce_tensor", lambda buffer: (None, arguments))
    monkeypatch.setattr(ipc, "gpu_id", lambda device: "GPU-1")
    described = json.loads(json.dumps(ipc.describe(torch.zeros(12, dtype=torch.uint8))))
    assert described["gpu"] == "GPU-1"
    opened = dict(zip(names, ipc.rebuild_arguments(described), strict=True))
    assert {name: opened[name] for name in given} == given
    assert (opened["tensor_size"], opened["dtype"]) == ((12,), torch.uint8)
    assert names.index("storage_device") == 6  # vLLM replaces the argument with this number


@pytest.mark.vllm
async def test_vllm_itself_takes_these_requests(parts, backend):
    """A renamed path, field or parameter of vLLM fails this test, and so does another rule of how
    its receiver packs weights."""
    installed = find_installed(find_build())
    if installed is None:
        pytest.skip("vLLM is not installed: openenv-pipe engine install vllm")
    server, client, source, versions = parts
    await publish(versions, client, 3)
    of_vllm = [each for each in server.requests if "weight" in each[0] or "rpc" in each[0]]
    replayed = subprocess.run(
        [installed.python, REPLAY, backend, str(CHUNK_BYTES)],
        input=json.dumps(of_vllm),
        env={"PYTHONPATH": python_path(sees_images=False), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
    )
    assert replayed.returncode == 0, replayed.stderr
    found = json.loads(replayed.stdout.splitlines()[-1])
    sizes = [chunk.num_bytes for chunk in divide(source.tensors(), CHUNK_BYTES)]
    assert found["problems"] == []
    assert found["version"].split(":")[2] == "3"  # of the label
    assert found["world"] == {"world_size": NUM_WORKERS}
    assert found["expected"] == (sizes if backend == "nccl" else [])
    assert found["handles"] == ([] if backend == "nccl" else [15] * len(sizes))
