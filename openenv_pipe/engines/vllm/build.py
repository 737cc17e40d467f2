"""Start a vLLM engine with its servers as its configuration says, and stop it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import RayClusterConfig, VllmEngineConfig
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.engine import VllmEngine
from openenv_pipe.engines.vllm.install import Build, Installed, require_installed
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.logprob_check import PROBE_MOVES, TEMPERATURE, LogprobCheck
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.placed_server import PlacedVllmServer
from openenv_pipe.engines.vllm.policy_source import PolicySource
from openenv_pipe.engines.vllm.publish import AdapterPublisher, Publisher, WeightsPublisher
from openenv_pipe.engines.vllm.publish_memory import MemoryPublisher
from openenv_pipe.engines.vllm.publish_mode import (
    PublishMode,
    choose_publish_mode,
    refuse_transfer,
    transfer_backend,
)
from openenv_pipe.engines.vllm.replica import Probe, Replica
from openenv_pipe.engines.vllm.server_command import ServerSpec, TransferBackend
from openenv_pipe.engines.vllm.servers import MakeProcesses, make_servers, own_processes
from openenv_pipe.engines.vllm.shared_server import LeasedVllmServer
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint, sleep_level
from openenv_pipe.engines.vllm.transfer import GlooLink, Link
from openenv_pipe.engines.vllm.transfer_ipc import IpcLink
from openenv_pipe.engines.vllm.transfer_nccl import NcclLink
from openenv_pipe.engines.vllm.weights_folder import weights_folder
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.tasks import in_thread, run_all

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A base model that servers load themselves."""

    path: str  # a folder, or an id on a model hub
    revision: str | None


@asynccontextmanager
async def open_engine(
    config: VllmEngineConfig,
    policy_source: PolicySource,
    *,
    source: Source | None,
    footprint: LearnerFootprint,
    logs: Path,
    executor: Executor,
    tell: Tell,
    make_processes: MakeProcesses = own_processes,
    nodes: RayClusterConfig | None = None,
) -> AsyncIterator[VllmEngine]:
    """Start the servers, publish the current policy to them and check it. Stop them at the end.

    Args:
        source: the base model; None: the engine writes it into a folder for the servers.
        footprint: the learner's use of this machine's GPUs.
        logs: the folder of the servers' log files.
        executor: torch's thread.
        make_processes: makes the servers of `engine.launch=managed` on this machine.
        nodes: the cluster on whose nodes they are started instead.

    Raises:
        ConfigError: the configuration does not fit the model or the machine.
        EngineError: a server does not start, or refuses the policy.
        TrainingError: a server computes other logprobs than the trainer.
    """
    mode = choose_publish_mode(config, policy_source.lora_rank)
    refuse_transfer(config, footprint, mode)
    level = sleep_level(config, footprint, mode=mode)
    build: Build = "cuda" if footprint.on_gpu else "cpu"
    installed = None
    if nodes is None and config.launch == "managed":
        sees_pictures = policy_source.placeholder_id is not None
        installed = require_installed(build, sees_pictures=sees_pictures)
    with weights_folder(config.weights_dir) as root:
        spec = await _server_spec(config, policy_source, mode, source, build, root, executor)
        backend = transfer_backend(config, mode, build)
        spec = replace(spec, sleeps=level > 0, transfer_backend=backend)
        servers = make_servers(
            config,
            spec,
            installed=installed,
            free_gpus=footprint.free_gpus,
            logs=logs,
            weights_dir=root,
            make_processes=make_processes,
            nodes=nodes,
        )
        facts = {
            "engine": {
                "launch": config.launch,
                "publish": mode,
                "weight_transfer": config.weight_transfer,
                "sleep_level": level,
                **_facts(installed, servers),
            }
        }
        publisher = build_publisher(
            config, mode, policy_source, root, executor, Owner.new(logs), backend
        )
        setup = _EngineSetup(config, policy_source, publisher, root, executor, level)
        async with setup.running(servers, facts, tell) as engine:
            yield engine


class _EngineSetup:
    """What all servers of an engine share, and the start and end of the engine."""

    def __init__(
        self,
        config: VllmEngineConfig,
        policy_source: PolicySource,
        publisher: Publisher,
        root: Path,
        executor: Executor,
        sleep_level: int,
    ) -> None:
        dtype = policy_source.precision if config.dtype == "auto" else config.dtype
        exact = "float32" if dtype == policy_source.precision == "float32" else "bfloat16"
        self._publisher = publisher
        self._config = config
        self._policy_source = policy_source
        self._root = root
        self._executor = executor
        self._sleep_level = sleep_level
        self._logprob_check = LogprobCheck(
            policy_source, dtype=exact, max_model_len=config.max_model_len
        )

    @asynccontextmanager
    async def running(
        self, servers: Sequence[VllmServer], facts: dict[str, Any], tell: Tell
    ) -> AsyncIterator[VllmEngine]:
        probe = await in_thread(self._executor, self._prepare)
        replicas = [
            Replica(
                number,
                server,
                self._config,
                publisher=self._publisher,
                logprob_check=self._logprob_check,
                probe=probe,
                exclusive=bool(self._sleep_level)
                or not isinstance(self._publisher, AdapterPublisher),
                vocabulary_size=self._policy_source.vocabulary_size,
                tell=_teller(tell, number if len(servers) > 1 else None),
            )
            for number, server in enumerate(servers)
        ]
        engine = VllmEngine(
            self._config,
            policy_source=self._policy_source,
            replicas=replicas,
            publisher=self._publisher,
            logprob_check=self._logprob_check,
            executor=self._executor,
            sleep_level=self._sleep_level,
            facts=facts,
        )
        try:
            await run_all(replica.supervisor.start() for replica in replicas)
            if self._sleep_level and self._config.launch == "attach":
                await run_all(self._refuse_sleepless(replica) for replica in replicas)
            await engine.publish(0)
            yield engine
        finally:
            await asyncio.shield(self._close(replicas))

    async def _close(self, replicas: Sequence[Replica]) -> None:
        withdraw = self._config.launch == "attach"
        closing = (replica.close(withdraw=withdraw) for replica in replicas)
        results = await asyncio.gather(*closing, return_exceptions=True)
        await asyncio.to_thread(self._publisher.close)
        for error in results:
            if error is not None:
                raise error

    async def _refuse_sleepless(self, replica: Replica) -> None:
        client = await replica.supervisor.serving()
        if not await client.can_sleep():
            raise ConfigError(
                f"engine.sleep={self._config.sleep}: the server at {client.url} cannot be put to "
                "sleep; start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode, or set "
                "engine.sleep=never"
            )

    def _prepare(self) -> Probe | None:
        """Compute the logprobs that servers are checked against. Call it in torch's thread.

        Where adapters are published, also write one with made-up values and return it.
        """
        self._logprob_check.expect(self._logprob_check.compute())
        if not isinstance(self._publisher, AdapterPublisher):
            return None
        folder = self._root / "probe"
        moves = PROBE_MOVES * self._logprob_check.bound
        expected_PV = self._policy_source.write_probe(
            folder, self._logprob_check.prompts, TEMPERATURE, moves=moves
        )
        return Probe(name=f"{self._root.name}-probe", folder=folder, expected=expected_PV)


def _teller(tell: Tell, number: int | None) -> Tell:
    """Return `tell` with the server's number before each message; None: it is the only server."""
    name = "engine" if number is None else f"engine {number}"
    return lambda text: tell(f"{name}: {text}")


def build_publisher(
    config: VllmEngineConfig,
    mode: PublishMode,
    policy_source: PolicySource,
    root: Path,
    executor: Executor,
    owner: Owner,
    backend: TransferBackend | None = None,
) -> Publisher:
    """Return the publisher. root: a folder in which servers on this machine can write."""
    if mode == "adapter":
        return AdapterPublisher(policy_source, root, executor, owner)
    if config.weight_transfer == "files":
        return WeightsPublisher(policy_source, root, executor, owner)
    numbers = itertools.count()

    def link(client: VllmClient) -> Link:
        if backend == "nccl":
            return NcclLink()
        return IpcLink() if backend == "ipc" else GlooLink(root / f"meeting-{next(numbers)}")

    return MemoryPublisher(policy_source, executor, link, owner)


def _facts(installed: Installed | None, servers: Sequence[VllmServer]) -> dict[str, Any]:
    """Return facts about the servers for the run's record."""
    facts: dict[str, Any] = {
        "vllm": installed.version if installed else None,
        "packages": installed.packages if installed else None,
    }
    shared = [server.about for server in servers if isinstance(server, LeasedVllmServer)]
    if shared:
        facts["shared_servers"] = shared[0] if len(shared) == 1 else shared
    placed = [server.about for server in servers if isinstance(server, PlacedVllmServer)]
    if placed:
        facts["on_nodes"] = placed[0]  # all nodes have the same version
    return facts


async def _server_spec(
    config: VllmEngineConfig,
    policy_source: PolicySource,
    mode: str,
    source: Source | None,
    build: Build,
    root: Path,
    executor: Executor,
) -> ServerSpec:
    if source is None and config.launch != "attach":
        folder = root / "base"
        await in_thread(executor, policy_source.write_base, folder)
        source = Source(path=str(folder), revision=None)
    return ServerSpec(
        model=source.path if source else "",
        revision=source.revision if source else None,
        build=build,
        dtype=policy_source.precision if config.dtype == "auto" else config.dtype,
        lora_rank=policy_source.lora_rank if mode == "adapter" else 0,
        sees_pictures=policy_source.placeholder_id is not None,
    )
