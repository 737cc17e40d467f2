"""A vLLM server shared by runs: leases, what is cleared between them, and when a new one starts."""

import asyncio
import itertools
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from openenv_pipe.commands.sweep import shared_servers as shared_servers_module
from openenv_pipe.commands.sweep.shared_servers import sharing
from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import shared_server as shared_server_module
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.engines.vllm.servers import ManagedLaunch
from openenv_pipe.engines.vllm.shared_server import LeasedVllmServer, SharedVllmServer, model_digest
from openenv_pipe.errors import EngineError

LIMIT_S = 120.0
CONFIG = compose(["conf=echo", "engine=vllm"]).config.engine


def spec_of(model="/tmp/model", **changes) -> ServerSpec:
    known = {"revision": None, "build": "cpu", "dtype": "float32", "lora_rank": 0}
    return ServerSpec(**{"model": str(model), **known, **changes})


class FakeServer:
    """A shared server that is ready at once."""

    made: ClassVar[list["FakeServer"]] = []

    def __init__(self, kind, wanted, logs):
        assert kind == "vllm"
        self.urls = [f"http://vllm/{len(self.made)}"]
        self.key = "a-key"
        self.failure = None
        self.closed = False
        self.made.append(self)

    def facts(self):
        return {}

    async def start(self):
        """The server is ready at once."""

    async def clear(self):
        """There is nothing to clear."""

    async def close(self):
        self.closed = True


@pytest.fixture
def provider(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_servers_module, "_build", FakeServer)
    monkeypatch.setattr(FakeServer, "made", [])
    with sharing(tmp_path / "logs", lambda *_: None) as found:
        yield found


@pytest.fixture
def servers_of(provider, tmp_path):
    """Make the leased servers of a run whose model has this content."""

    def make(content: str, *specs: ServerSpec) -> list[LeasedVllmServer]:
        written = tmp_path / "written"
        for spec in specs:
            Path(spec.model).mkdir(parents=True, exist_ok=True)
            (Path(spec.model) / "config.json").write_text(content)
        launch = ManagedLaunch(
            specs=specs, config=CONFIG, python=Path(), logs=tmp_path, weights_dir=written
        )
        return provider.vllm_processes(launch)

    return make


@pytest.fixture
def use(servers_of, tmp_path):
    """Start and stop a leased server as a run does, without requests; return its URL."""
    numbers = itertools.count()

    async def use_one(content: str = "a", **changes: Any) -> str:
        folder = tmp_path / f"written/run-{next(numbers)}"
        (server,) = servers_of(content, spec_of(folder, **changes))
        await server.start()
        await server.stop()
        return server.url

    return use_one


async def test_runs_of_one_model_have_the_same_server(use):
    assert {await use() for _ in range(3)} == {"http://vllm/0"}


async def test_a_run_of_two_servers_leaves_both_to_the_next(servers_of, tmp_path):
    async def run() -> list[str]:
        specs = [spec_of(tmp_path / "written/model", number=number) for number in (0, 1)]
        servers = servers_of("a", *specs)
        await asyncio.gather(*(server.start() for server in servers))
        await asyncio.gather(*(server.stop() for server in servers))
        return [server.url for server in servers]

    first = await run()
    assert len(set(first)) == 2
    assert await run() == first


@pytest.mark.parametrize("changes", [{"lora_rank": 16}, {"dtype": "bfloat16"}])
async def test_another_need_ends_the_idle_server_first(use, changes):
    assert await use() == "http://vllm/0"
    assert await use(**changes) == "http://vllm/1"
    assert FakeServer.made[0].closed  # otherwise the next server would have no memory


async def test_another_model_gets_another_server(use):
    assert await use("a") != await use("b")


async def test_a_death_is_told_and_who_asks_again_gets_another(servers_of, tmp_path):
    (server,) = servers_of("a", spec_of(tmp_path / "written/model"))
    await server.start()
    assert server.about["num_jobs_before"] == 0
    FakeServer.made[0].failure = EngineError("the server died (exit code 9)")
    assert "exit code 9" in await asyncio.wait_for(server.died(), LIMIT_S)
    await server.stop()
    await server.start()
    assert server.url == "http://vllm/1"
    await server.stop()


def test_a_model_that_a_run_has_written_is_known_by_its_content(tmp_path):
    def digest(weights: bytes, config: bytes = b"{}", *, matter: bool) -> str:
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "config.json").write_bytes(config)
        return model_digest(spec_of(tmp_path), written=True, weights_matter=matter)

    assert digest(b"1", matter=True) != digest(b"2", matter=True)
    assert digest(b"1", matter=False) == digest(b"2", matter=False)
    assert digest(b"1", matter=False) != digest(b"1", b"[]", matter=False)


def test_a_model_of_a_hub_is_known_by_its_name():
    names = [spec_of("Qwen/Qwen3-0.6B"), spec_of("Qwen/Qwen3-0.6B", revision="abc")]
    digests = [model_digest(each, written=False, weights_matter=True) for each in names]
    assert len(set(digests)) == 2


# --- the owner of the servers --------------------------------------------------------------------


class FakeClient:
    """A server that a killed run has left paused, with two adapters."""

    def __init__(self, healthy=True):
        self.healthy = healthy
        self.left = ["policy-1", "policy-2"]
        self.num_resets = 0
        self.is_paused = True

    async def is_healthy(self, limit_s):
        return self.healthy

    async def resume(self):
        self.is_paused = False

    async def adapters(self):
        assert not self.is_paused
        return list(self.left)

    async def unload_adapter(self, name):
        self.left.remove(name)

    async def reset_prefix_cache(self):
        self.num_resets += 1


@pytest.fixture
def shareable(tmp_path, monkeypatch) -> SharedVllmServer:
    installed = SimpleNamespace(python="python")
    monkeypatch.setattr(shared_server_module, "find_installed", lambda _: installed)
    wanted = {"spec": asdict(spec_of()), "config": CONFIG.model_dump(mode="json"), "model": "a"}
    return SharedVllmServer(wanted, tmp_path)


async def test_a_server_loses_what_a_run_has_left(shareable):
    client = FakeClient()
    shareable._supervisor = SimpleNamespace(client=client)
    await shareable.clear()
    assert client.left == []
    assert client.num_resets == 1
    assert not client.is_paused


@pytest.mark.parametrize("client", [None, FakeClient(healthy=False)])
async def test_a_silent_server_is_not_lent_again(shareable, client):
    shareable._supervisor = SimpleNamespace(client=client)
    with pytest.raises(EngineError, match="does not answer"):
        await shareable.clear()


def test_a_server_has_failed_once_it_is_down(shareable):
    assert shareable.failure is None  # the server has not been started
    shareable._started = True
    assert isinstance(shareable.failure, EngineError)
