"""From a configuration to a running engine, and to its end."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.canary import PROBE_MOVES, TEMPERATURE, Canary
from openenv_pipe.engines.vllm.client import ServerGoneError, VllmClient
from openenv_pipe.engines.vllm.engine import VllmEngine
from openenv_pipe.engines.vllm.install import (
    VERSION,
    Build,
    Installed,
    find_installed,
    install,
)
from openenv_pipe.engines.vllm.kept import BorrowedServer, model_digest
from openenv_pipe.engines.vllm.launch import AttachedServer, ManagedServer, Server
from openenv_pipe.engines.vllm.launch_docker import DockerServer
from openenv_pipe.engines.vllm.life import ServerLife
from openenv_pipe.engines.vllm.publish import AdapterPublisher, Publisher, WeightsPublisher
from openenv_pipe.engines.vllm.server_command import Plan
from openenv_pipe.engines.vllm.trainee import Trainee
from openenv_pipe.engines.vllm.weights_folder import weights_folder
from openenv_pipe.errors import ConfigError, EngineError

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the base model is, if it need not be written for the server."""

    path: str
    revision: str | None


@asynccontextmanager
async def open_engine(
    config: VllmEngineConfig,
    trainee: Trainee,
    *,
    source: Source | None,
    on_gpu: bool,
    logs: Path,
    executor: Executor,
    tell: Tell,
    keeper: Path | None = None,
) -> AsyncIterator[VllmEngine]:
    """The engine with the policy as it is now, published and checked. All ends with the block.

    keeper: the socket of a process that keeps managed servers for several runs.
    Raises ConfigError, EngineError, and TrainingError from the canary.
    """
    way = publishing(config, trainee)
    build: Build = "cuda" if on_gpu else "cpu"
    installed = await installed_or_asked(build, tell) if config.launch == "managed" else None
    with weights_folder(config.weights_dir) as root:
        plan = await _plan(config, trainee, way, source, build, root, executor)
        if keeper is not None and config.launch == "managed":
            digest = model_digest(plan, written=source is None, weights_matter=way == "adapter")
            server: Server = BorrowedServer(plan, config, digest, keeper)
        else:
            server = _server(config, plan, installed, logs / "engine.log", root)
        engine = _Opening(config, trainee, way, server, root, executor, tell, installed)
        async with engine.opened() as opened:
            yield opened


class _Opening:
    """The parts of an engine know each other in a circle; here it is closed."""

    def __init__(
        self,
        config: VllmEngineConfig,
        trainee: Trainee,
        way: str,
        server: Server,
        root: Path,
        executor: Executor,
        tell: Tell,
        installed: Installed | None,
    ) -> None:
        dtype = trainee.precision if config.dtype == "auto" else config.dtype
        exact = "float32" if dtype == trainee.precision == "float32" else "bfloat16"
        publisher: Publisher
        if way == "adapter":
            publisher = AdapterPublisher(trainee, root, executor)
        else:
            publisher = WeightsPublisher(trainee, root, executor)
        self._trainee = trainee
        self._root = root
        self._executor = executor
        self._publisher = publisher
        self._canary = Canary(trainee, dtype=exact, max_model_len=config.max_model_len)
        self._is_first = True
        self._is_attached = config.launch == "attach"
        self._life = ServerLife(server, config, restore=self._restore, tell=tell)
        self._engine = VllmEngine(
            config,
            end_id=trainee.end_id,
            life=self._life,
            publisher=publisher,
            canary=self._canary,
            executor=executor,
            facts={
                "engine": {
                    "launch": config.launch,
                    "publish": way,
                    "vllm": installed.version if installed else None,
                    "packages": installed.packages if installed else None,
                    **({"kept": server.about} if isinstance(server, BorrowedServer) else {}),
                }
            },
        )

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[VllmEngine]:
        loop = asyncio.get_running_loop()
        self._canary.expect(await loop.run_in_executor(self._executor, self._canary.compute))
        try:
            await self._life.start()
            await self._engine.publish(0)
            yield self._engine
        finally:
            await asyncio.shield(self._close())

    async def _close(self) -> None:
        await self._engine.server_metrics.close()
        client = self._life.client
        if self._is_attached and client is not None:
            with contextlib.suppress(ServerGoneError, EngineError):
                await self._publisher.withdraw(client)
        await self._life.close()

    async def _restore(self, client: VllmClient) -> None:
        """The first server gets a probe before the policy, a later one what the last one had."""
        if not self._is_first:
            await self._engine.restore(client)
            return
        self._is_first = False
        if isinstance(self._publisher, AdapterPublisher):
            await self._try_probe(client)

    async def _try_probe(self, client: VllmClient) -> None:
        """A fresh adapter changes nothing, so that it is applied shows only in a made-up one."""
        folder = self._root / "probe"
        probe_PV = await asyncio.get_running_loop().run_in_executor(
            self._executor,
            lambda: self._trainee.write_probe(
                folder,
                self._canary.prompts,
                TEMPERATURE,
                moves=PROBE_MOVES * self._canary.bound,
            ),
        )
        name = f"{self._root.name}-probe"
        await client.load_adapter(name, folder)
        try:
            await self._canary.check_probe(client, name, probe_PV)
        finally:
            await client.unload_adapter(name)


def publishing(config: VllmEngineConfig, trainee: Trainee) -> str:
    """adapter, merged or full. Raises ConfigError if the model cannot be published like that."""
    if config.publish == "auto":
        return "adapter" if trainee.lora_rank else "full"
    if (config.publish == "full") == bool(trainee.lora_rank):
        fits = "full" if not trainee.lora_rank else "adapter or merged"
        raise ConfigError(
            f"engine.publish={config.publish} does not fit model.lora.rank={trainee.lora_rank}; "
            f"expected {fits}, or auto"
        )
    return config.publish


async def installed_or_asked(build: Build, tell: Tell) -> Installed:
    """The environment of vLLM, made after asking. Raises ConfigError without one."""
    if found := find_installed(build):
        return found
    command = f"`openenv-pipe engine install vllm --build {build}`"
    question = f"vLLM {VERSION} ({build}) is not installed; install it now, some gigabytes? [y/N] "
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"vLLM {VERSION} ({build}) is not installed; {command} does that, once")
    print(question, end="", file=sys.stderr, flush=True)
    answer = await asyncio.to_thread(sys.stdin.readline)
    if answer.strip().lower() not in ("y", "yes"):
        raise ConfigError(f"engine=vllm needs vLLM; {command} installs it, once")
    return await asyncio.to_thread(install, build, tell)


async def _plan(
    config: VllmEngineConfig,
    trainee: Trainee,
    way: str,
    source: Source | None,
    build: Build,
    root: Path,
    executor: Executor,
) -> Plan:
    if source is None and config.launch != "attach":
        folder = root / "base"
        await asyncio.get_running_loop().run_in_executor(executor, trainee.write_base, folder)
        source = Source(path=str(folder), revision=None)
    return Plan(
        model=source.path if source else "",
        revision=source.revision if source else None,
        build=build,
        dtype=trainee.precision if config.dtype == "auto" else config.dtype,
        lora_rank=trainee.lora_rank if way == "adapter" else 0,
    )


def _server(
    config: VllmEngineConfig, plan: Plan, installed: Installed | None, log: Path, root: Path
) -> Server:
    if config.launch == "attach":
        return AttachedServer(config)
    if config.launch == "docker":
        model = Path(plan.model)
        folders = [root] if not model.is_dir() or model.is_relative_to(root) else [root, model]
        return DockerServer(plan, config, log, folders)
    assert installed is not None
    return ManagedServer(plan, config, installed.python, log)
