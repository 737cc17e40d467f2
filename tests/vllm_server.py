"""A real vLLM server for the tests that attach to one, shared by the tests of a file, and its
model.

It serves the tiny model of `conf=smoke` with adapters allowed, so that every way to publish can be
tried on it. Tests that change all weights restore the base model: see `base_weights`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.engines.vllm import LearnerFootprint, open_engine
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.engine import VllmEngine
from openenv_pipe.engines.vllm.installed import VERSION, Installed, find_build, find_installed
from openenv_pipe.engines.vllm.launch import VllmProcess
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.weights import PolicyWeights

MOST_AT_ONCE = 1 << 16  # bytes per read
COMPLETION = b"POST /inference/v1/generate "  # how a request begins
ASK_LIMIT_S = 120.0  # a request is sent within a moment on an idle machine
START_LIMIT_S = 400.0  # 20 to 30 s on two idle cores
LORA_RANK = 8
# Not compiled, which takes half of the time of a server's start.
EAGER = "engine.arguments=[--enforce-eager]"
SMALL = (
    "conf=smoke",
    "engine=vllm",
    "num_threads=1",
    "device=cpu",
    "host.sessions_per_server=8",
    "env.max_episode_tokens=256",
    "trainer.warm_start.steps=0",
    "trainer.steps=3",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A running server."""

    url: str
    key: str
    base: Path  # the folder of the model
    log: Path

    @property
    def attach(self) -> tuple[str, ...]:
        """Return overrides that make a run use the server."""
        return "engine.launch=attach", f"engine.url={self.url}", f"engine.api_key={self.key}"


class ServerProxy:
    """A TCP proxy to a server. Closing it looks like the server's death. Use it in `async with`.

    While `may_answer` is cleared, requests reach the server and no answer comes back, so that a
    test can act while they are certainly under way.
    """

    def __init__(self, url: str) -> None:
        self.url = ""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_asked = 0  # requests for completions that were passed to the server
        self._there = urlsplit(url)
        self._port = 0  # the first start takes any free port, later ones the same port
        self._server: asyncio.Server | None = None
        self._passing: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    async def __aenter__(self) -> "ServerProxy":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """Break all connections and accept no new ones."""
        assert self._server is not None
        self._server.close()
        self.may_answer.set()
        passing = dict(self._passing)
        for writers in passing.values():
            for writer in writers:
                writer.transport.abort()
        await asyncio.gather(*passing, return_exceptions=True)

    async def until_asked(self, count: int) -> None:
        """Wait until so many requests for completions have been passed to the server."""
        async with asyncio.timeout(ASK_LIMIT_S):
            while self.num_asked < count:
                await asyncio.sleep(0.01)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._there.hostname, self._there.port)
        task = asyncio.current_task()
        self._passing[task] = [writer, back]
        try:
            await asyncio.gather(self._pass_on(reader, back), self._pass_back(there, writer))
        finally:
            del self._passing[task]

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for content in _contents(reader):
            await _write(writer, content)
            self.num_asked += content.startswith(COMPLETION)
        await _close(writer)

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for content in _contents(reader):
            await self.may_answer.wait()
            await _write(writer, content)
        await _close(writer)


async def _contents(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    with contextlib.suppress(ConnectionError):
        while content := await reader.read(MOST_AT_ONCE):
            yield content


async def _write(writer: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(content)
        await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def installed_vllm() -> Installed | str:
    """Return vLLM's environment, or the reason why tests without one are skipped."""
    build = find_build()
    command = f"openenv-pipe engine install vllm --build {build}"
    return find_installed(build) or f"not installed: vLLM {VERSION} ({build}); {command}"


def small_config(*overrides: str) -> RunConfig:
    return compose([*SMALL, *overrides]).config


def small_policy(config: RunConfig) -> Policy:
    return load_policy(config.model, seed=config.seed, device=torch.device("cpu"))


@asynccontextmanager
async def opened(
    served: Served, logs: Path, *overrides: str
) -> AsyncIterator[tuple[VllmEngine, Policy]]:
    """An engine attached to the server, and the policy that it serves."""
    config = small_config(*served.attach, *overrides)
    policy = small_policy(config)
    with ThreadPoolExecutor(1) as executor:
        async with open_engine(
            config.engine,
            PolicyWeights(policy),
            source=None,
            footprint=LearnerFootprint(on_gpu=False),
            logs=logs,
            executor=executor,
            notify=lambda text: None,
        ) as engine:
            yield engine, policy


@contextmanager
def vllm_server(
    installed: Installed, folder: Path, *overrides: str, sees_images: bool = False
) -> Iterator[Served]:
    """Run the server for the length of the block. overrides: choose another model, and others."""
    config, base = small_config(*overrides), folder / "base"
    PolicyWeights(small_policy(config)).write_base(base)
    spec = ServerSpec(
        model=str(base),
        revision=None,
        build="cpu",
        dtype="float32",
        lora_rank=LORA_RANK,
        sees_images=sees_images,
    )
    log = folder / "engine.log"
    server = VllmProcess(spec, config.engine, installed.python, log)
    try:
        asyncio.run(_start(server))
        yield Served(url=server.url, key=server.key, base=base, log=log)
    finally:
        asyncio.run(server.stop())


async def _start(server: VllmProcess) -> None:
    await server.start()
    deadline = time.monotonic() + START_LIMIT_S
    async with VllmClient(server.url, api_key=server.key, request_timeout_s=60) as client:
        while not await client.is_healthy(5.0):
            assert time.monotonic() < deadline, f"no server within {START_LIMIT_S} s: {server.log}"
            await asyncio.sleep(0.1)
