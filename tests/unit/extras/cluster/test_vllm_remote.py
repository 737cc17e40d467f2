"""Servers on other machines: the files that they are sent, and the key that they ask for."""

import asyncio
from types import SimpleNamespace

import pytest

from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.errors import ConfigError, EngineError, HostError
from openenv_pipe.extras.cluster import vllm_server
from openenv_pipe.extras.cluster.nodes import WorkerLostError
from openenv_pipe.extras.cluster.vllm_server import (
    MAX_LOG_BYTES,
    NodeFiles,
    NodeProcess,
    RemoteVllmServer,
    _read,
)
from tests.small_vllm import VALUE, SmallServer
from tests.vllm_server import small_config

KEY = "a-key-of-this-test"


class FakeProcess:
    """Stands in for a `PlacedProcess`, with the node's object in this process."""

    name = "vLLM server 0, on node b,"

    def __init__(self, node: NodeProcess) -> None:
        self.error: Exception | None = None
        self._node = node

    async def call(self, method, *arguments):
        if self.error is not None:
            raise self.error
        return await getattr(self._node, method)(*arguments)


@pytest.fixture
def node(tmp_path):
    node = NodeProcess(small_config().engine, tmp_path / "not there", KEY, {})
    node._folder = tmp_path / "node"
    return node


async def test_folders_arrive_as_they_are_in_parts(node, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "PART_BYTES", 10)
    sent = {"model.safetensors": bytes(range(35)), "empty": b"", "more/config.json": b"{}"}
    for name, content in sent.items():
        path = tmp_path / "step-1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    files = NodeFiles(FakeProcess(node), tmp_path / "node")
    folders = [await files.send(tmp_path / "step-1") for _ in range(2)]
    assert folders[0] != folders[1]  # a server may still read the first
    for folder in folders:
        found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}
        assert found | {"empty": (folder / "empty").read_bytes()} == sent
    await files.remove(folders[0])
    assert list((tmp_path / "node").iterdir()) == [folders[1]]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(WorkerLostError("lost"), ServerGoneError), (HostError("full"), EngineError)],
)
async def test_a_lost_node_is_a_server_that_is_gone(node, tmp_path, error, kind):
    process = FakeProcess(node)
    process.error = error
    with pytest.raises(kind, match=str(error)):
        await NodeFiles(process, tmp_path).remove(tmp_path / "step-1")


async def test_a_server_elsewhere_reads_copies_while_it_needs_them(node, tmp_path):
    server = SmallServer(tmp_path / "log")
    await server.start()
    copies = tmp_path / "node"
    files = NodeFiles(FakeProcess(node), copies)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / VALUE).write_text("0.5")
    async with VllmClient(server.url, api_key=KEY, request_timeout_s=10, files=files) as client:
        await client.load_adapter("step-1", tmp_path / "step-1")
        (copy,) = copies.iterdir()  # a server may read an adapter again
        await client.unload_adapter("step-1")
        assert not copy.exists()
        async with client.readable(tmp_path / "step-1") as folder:
            assert folder.parent == copies
            await client.load_weights(folder, "1")
        assert list(copies.iterdir()) == []
        assert server.values == {"base": 0.5}
    await server.stop()


async def test_a_node_without_the_models_folder_says_so(node, tmp_path):
    with pytest.raises(ConfigError, match=r"does not have the folder model.path=.*; copy it"):
        await node.start(None, tmp_path / "model")


class LoggingProcess:
    """Stands in for the `PlacedProcess` of a server that has written a log."""

    name = "a server"

    def __init__(self, log) -> None:
        self._log = log
        self._ended = asyncio.Event()

    async def call(self, method, *arguments):
        await asyncio.sleep(0)
        if method == "died":
            await self._ended.wait()
            return "exit code 1"
        if method == "stop":
            self._ended.set()
            await asyncio.sleep(0.01)  # for whoever waits for the end
        content = _read(self._log, *arguments)
        await asyncio.sleep(0.01)
        return content

    def kill(self):
        pass


@pytest.mark.parametrize("size", [3, MAX_LOG_BYTES + 5])
async def test_the_log_of_a_server_that_is_stopped_is_copied_once_and_to_its_end(tmp_path, size):
    content = b"x" * size + b"\nRuntimeError: out of memory\n"
    (tmp_path / "node.log").write_bytes(content)
    server = RemoteVllmServer(
        SimpleNamespace(number=0),
        small_config().engine,
        SimpleNamespace(),
        is_written=False,
        log=tmp_path / "engine.log",
    )
    server._process = LoggingProcess(tmp_path / "node.log")
    watching = asyncio.create_task(server.died())  # as the supervisor does
    await asyncio.sleep(0)
    await server.stop()
    await watching
    assert server.log.read_bytes() == content
