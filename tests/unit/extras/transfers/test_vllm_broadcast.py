"""Broadcasting weights from memory to memory. Learner and worker are threads in a real process
group."""

import asyncio
import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import LearnerFootprint
from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.check import check_engine
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.inside import openenv_pipe_broadcast as broadcast
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.publish_mode import check_transfer
from openenv_pipe.engines.vllm.versions import Versions
from openenv_pipe.errors import ConfigError, EngineError, OutOfMemoryError
from openenv_pipe.extras.transfers.build import MemoryTransfer
from openenv_pipe.extras.transfers.link import GlooLink

CPU = torch.device("cpu")
PATIENCE_S = 60.0


class FakePolicyWeights:
    """A policy whose only weight is a number."""

    def __init__(self) -> None:
        self.value = 0.0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"value": torch.tensor([self.value])}


class FakeServer:
    """A client of a server with one worker, which receives a real broadcast."""

    url = "http://server"
    is_closed = False

    def __init__(self) -> None:
        self.received: list[tuple[float, str]] = []
        self.calls: list[str] = []
        self.failure: Exception | None = None  # raised by the next call that receives weights
        self.absence: Exception | None = None  # raised by the next call that joins
        self._receiver: broadcast.Receiver | None = None

    @contextlib.asynccontextmanager
    async def replacing_weights(self):
        self.calls.append("pause")
        yield
        self.calls.append("resume")

    async def join_broadcast(self, meeting) -> None:
        self.calls.append("join")
        if self.absence is not None:
            absence, self.absence = self.absence, None
            raise absence
        self._receiver = await asyncio.to_thread(broadcast.Receiver, meeting, 0, 1, CPU)

    async def leave_broadcast(self) -> None:
        self._receiver.close()

    async def receive_weights(self, version: str, limit_s: float) -> None:
        self.calls.append("receive")
        if self.failure is not None:
            failure, self.failure = self.failure, None
            self._receiver.close()
            raise failure
        weights = await asyncio.to_thread(lambda: dict(self._receiver.weights()))
        self.received.append((weights["value"].item(), version.split(":")[2]))  # of the label


@pytest.fixture
def parts(tmp_path):
    """Return the versions, the weights, and the executor of torch's thread."""
    weights = FakePolicyWeights()
    with ThreadPoolExecutor(1) as executor:
        numbers = itertools.count(1)
        transfer = MemoryTransfer(
            weights, executor, lambda _: GlooLink(tmp_path / f"meeting-{next(numbers)}")
        )
        yield Versions(transfer, Owner.new("a test"), "run"), weights, executor
        transfer.close()


async def published(versions, weights, step: int, *servers: FakeServer) -> None:
    """Publish as the engine does; the policy's number is its step."""
    weights.value = float(step)
    policy = await versions.adopt(step, np.zeros((1, 1)))
    sending = (versions.transfer.send(each, policy, paused=False) for each in servers)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*sending)


def test_what_is_received_is_what_was_sent(tmp_path):
    """Weights of several types, shapes and strides are sent more than once."""
    weights = {
        "matrix": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "short": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "number": torch.tensor(3, dtype=torch.int64),
        "trained": torch.nn.Parameter(torch.ones(2)),
    }
    sender = broadcast.Sender(tmp_path / "meeting")
    found = []

    def receive() -> None:
        receiver = broadcast.Receiver(tmp_path / "meeting", 0, 1, CPU)
        found.extend(dict(receiver.weights()) for _ in range(2))

    worker = threading.Thread(target=receive)
    worker.start()
    assert not sender.is_connected
    sender.send(weights)
    weights["matrix"] += 1.0
    sender.send(weights)
    worker.join(PATIENCE_S)
    assert sender.is_connected
    sender.close()
    for received, moved in zip(found, (1.0, 0.0), strict=True):
        assert list(received) == list(weights)
        for name, sent in weights.items():
            assert received[name].dtype == sent.dtype
            expected = sent.detach() - moved if name == "matrix" else sent.detach()
            torch.testing.assert_close(received[name], expected)


async def test_a_server_on_another_kind_of_device_is_told(tmp_path):
    sender = broadcast.Sender(tmp_path / "meeting")
    ends = await asyncio.gather(
        asyncio.to_thread(broadcast.Receiver, sender.meeting, 0, 1, torch.device("cuda")),
        asyncio.to_thread(sender.send, FakePolicyWeights().tensors()),
        return_exceptions=True,
    )
    for error in ends:
        with pytest.raises(broadcast.BroadcastError, match=r"on a CPU, .*on cuda.*transfer=files"):
            raise error


def test_a_meeting_is_for_its_user_and_where_the_server_sees_it(tmp_path):
    sender = broadcast.Sender(tmp_path / "meeting")
    assert sender.meeting.stat().st_mode & 0o777 == 0o600
    with pytest.raises(broadcast.BroadcastError, match=r"does not see /nowhere/meeting"):
        broadcast.Receiver(Path("/nowhere/meeting"), 0, 1, CPU)
    sender.close()


async def test_each_server_gets_each_version_and_joins_once(parts):
    versions, weights, _ = parts
    servers = [FakeServer(), FakeServer()]
    for version in (0, 1):
        versions.transfer.begin_update()
        await published(versions, weights, version, *servers)
    for server in servers:
        assert server.received == [(0.0, "0"), (1.0, "1")]
        assert server.calls == ["pause", "join", "receive", "resume", "pause", "receive", "resume"]
        assert versions.latest.model == BASE


async def test_a_restarted_server_gets_the_policy_as_it_is(parts):
    versions, weights, _ = parts
    assert await versions.restore(FakeServer()) is None
    await published(versions, weights, 3)
    restarted = FakeServer()
    assert await versions.restore(restarted) is versions.latest
    assert restarted.received == [(3.0, "3")]
    assert restarted.calls == ["pause", "join", "receive", "resume"]


async def test_a_server_that_restarts_amid_an_update_waits_for_the_next_policy(parts):
    """During an update the last policy no longer exists, and the next one does not exist yet."""
    versions, weights, _ = parts
    await published(versions, weights, 1)
    versions.transfer.begin_update()
    weights.value = 1.5
    restarted = FakeServer()
    restoring = asyncio.create_task(versions.restore(restarted))
    await asyncio.sleep(0.05)
    assert restarted.calls == []
    await published(versions, weights, 2)
    async with asyncio.timeout(PATIENCE_S):
        assert await restoring is versions.latest
    assert restarted.received == [(2.0, "2")]


async def test_a_server_that_pauses_when_an_update_begins_waits_for_the_next_policy(parts):
    versions, weights, _ = parts
    await published(versions, weights, 1)
    restarted = FakeServer()
    replacing = restarted.replacing_weights

    @contextlib.asynccontextmanager
    async def pausing_long():
        async with replacing():
            if restarted.calls == ["pause"]:
                versions.transfer.begin_update()
                weights.value = 1.5
            yield

    restarted.replacing_weights = pausing_long
    restoring = asyncio.create_task(versions.restore(restarted))
    while not restarted.calls:
        await asyncio.sleep(0)
    await published(versions, weights, 2)
    async with asyncio.timeout(PATIENCE_S):
        assert await restoring is versions.latest
    assert restarted.received == [(2.0, "2")]


async def test_an_update_waits_for_what_is_being_sent(parts):
    """Both use one thread: the policy is read before the learner changes it."""
    versions, weights, executor = parts
    await published(versions, weights, 1)
    server = FakeServer()
    restoring = asyncio.create_task(versions.restore(server))
    while not versions.transfer._links:
        await asyncio.sleep(0)
    versions.transfer.begin_update()
    update = asyncio.get_running_loop().run_in_executor(executor, setattr, weights, "value", 1.5)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(restoring, update)
    assert server.received == [(1.0, "1")]


async def test_a_server_that_goes_away_is_told_as_such_and_met_anew(parts):
    versions, weights, _ = parts
    server = FakeServer()
    await published(versions, weights, 0, server)
    server.failure = ServerGoneError("no answer")
    with pytest.raises(ServerGoneError, match="no answer"):
        await published(versions, weights, 1, server)
    await published(versions, weights, 1, server)
    assert server.calls[-4:] == ["pause", "join", "receive", "resume"]
    assert server.received == [(0.0, "0"), (1.0, "1")]


async def test_nobody_waits_for_a_server_that_does_not_come(parts, monkeypatch):
    """The publish fails at once, and the next one uses another meeting point."""
    versions, weights, _ = parts
    monkeypatch.setattr(broadcast, "LONGEST_WAIT", timedelta(seconds=10 * PATIENCE_S))
    server = FakeServer()
    server.absence = ServerGoneError("no answer")
    with pytest.raises(ServerGoneError, match="no answer"):
        await published(versions, weights, 1, server)
    await published(versions, weights, 1, server)
    assert server.received == [(1.0, "1")]
    assert server.calls == ["pause", "join", "pause", "join", "receive", "resume"]


async def test_a_cancelled_publish_leaves_nobody_waiting(parts, monkeypatch):
    """Ctrl-C while weights are merged: the server is not asked to receive them."""
    versions, weights, executor = parts
    monkeypatch.setattr(broadcast, "LONGEST_WAIT", timedelta(seconds=10 * PATIENCE_S))
    is_merging, may_go_on = threading.Event(), threading.Event()
    tensors = weights.tensors

    def slow() -> dict[str, torch.Tensor]:
        is_merging.set()
        may_go_on.wait(PATIENCE_S)
        return tensors()

    monkeypatch.setattr(weights, "tensors", slow)
    server = FakeServer()
    publishing = asyncio.create_task(published(versions, weights, 1, server))
    await asyncio.to_thread(is_merging.wait, PATIENCE_S)
    publishing.cancel()
    await asyncio.wait([publishing], timeout=PATIENCE_S)
    assert publishing.cancelled()
    may_go_on.set()
    async with asyncio.timeout(PATIENCE_S):  # torch's thread is free again
        await asyncio.get_running_loop().run_in_executor(executor, tensors)
    assert server.calls == ["pause"]


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ("CUDA error", EngineError, r"cannot be sent to http://server: CUDA error"),
        ("CUDA out of memory", OutOfMemoryError, r"publishing the weights: .*engine\.publish="),
    ],
)
async def test_weights_that_cannot_be_had_ask_nothing_of_the_server(
    parts, monkeypatch, failure, error, message
):
    versions, weights, _ = parts

    def fail() -> None:
        raise RuntimeError(failure)

    monkeypatch.setattr(weights, "tensors", fail)
    server = FakeServer()
    with pytest.raises(error, match=message):
        await published(versions, weights, 1, server)
    assert server.calls == ["pause"]


ONE, CPU_ONLY = LearnerFootprint(on_gpu=True), LearnerFootprint(on_gpu=False)
TWO = LearnerFootprint(on_gpu=True, free_gpus=("1",))
FAR = ("engine.launch=attach", "engine.url=[http://localhost:8000,http://far:8000]")


def test_each_transfer_has_its_devices():
    for transfer, footprint, *overrides in (
        ("broadcast", CPU_ONLY),
        ("broadcast", TWO),
        ("broadcast", ONE, *FAR),
        ("broadcast", replace(ONE, servers_elsewhere=True)),
        ("ipc", ONE),
        ("files", ONE),
        ("files", CPU_ONLY, *FAR),
    ):
        check_transfer(configured(transfer, *overrides), footprint)
    rejected = {
        "share the learner's GPU": ("broadcast", ONE),
        "needs servers on this machine, and http": ("broadcast", CPU_ONLY, *FAR),
        "vllm_on_nodes=true": ("broadcast", replace(CPU_ONLY, servers_elsewhere=True)),
        "learns on a CPU": ("ipc", CPU_ONLY),
        "that the learner does not use": ("ipc", TWO),
    }
    for message, (transfer, footprint, *overrides) in rejected.items():
        with pytest.raises(ConfigError, match=message):
            check_transfer(configured(transfer, *overrides), footprint)


def test_a_transfer_between_gpus_is_rejected_on_a_cpu_by_check():
    with pytest.raises(ConfigError, match="learns on a CPU"):
        check_engine(configured("ipc"), "cpu", "full")


def configured(transfer: str, *overrides: str):
    given = ["conf=smoke", "engine=vllm", f"engine.weight_transfer={transfer}", *overrides]
    return compose(given).config.engine
