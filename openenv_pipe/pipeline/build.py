"""Build the components of a run from its configuration, and close them at its end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.environments.tasks import known_splits
from openenv_pipe.environments.tasks.splits import KnownSets
from openenv_pipe.learner.devices import Devices, build_devices
from openenv_pipe.learner.seeding import prepare_thread
from openenv_pipe.models.load import select_device
from openenv_pipe.pipeline.cluster import Cluster, build_cluster
from openenv_pipe.pipeline.components import Components, build_roles
from openenv_pipe.pipeline.engines import EngineParts, opened_engine
from openenv_pipe.pipeline.loading import load_checked
from openenv_pipe.pipeline.servers import OwnServers, ServerProvider
from openenv_pipe.registry import block_types, load
from openenv_pipe.rewards import open_scorer
from openenv_pipe.rollout import RolloutContext
from openenv_pipe.rollout.context import EpisodeLoop
from openenv_pipe.rollout.episode import LocalLoop
from openenv_pipe.system.process import usable_cores
from openenv_pipe.system.progress import Progress, reporting_long_waits
from openenv_pipe.system.tasks import in_thread, run_all

_log = logging.getLogger(__name__)


@asynccontextmanager
async def assembled(
    config: RunConfig,
    logs: Path,
    verdicts: Sequence[Path],
    progress: Progress,
    *,
    checkpoint: Path | None = None,
    servers: ServerProvider | None = None,
) -> AsyncIterator[Components]:
    """Build all components of a run, servers and model side by side; close them at its end.

    Args:
        verdicts: folders of the answers of judges and verifiers; the first is the run's own, the
            others are read only.
        servers: None: the run starts its own.

    Raises:
        ConfigError: the configuration does not fit the model, device or environment.
        HostError, EngineError: a server did not start.
    """
    device = select_device(config.device)
    num_threads = config.num_threads or len(usable_cores())
    known_sets = {
        name: await asyncio.to_thread(known_splits, each)
        for name, each in config.environments.items()
    }
    servers = servers or OwnServers()
    cluster = build_cluster(config)
    loops = _build_loops(config, cluster, servers, logs)
    torch_thread = ThreadPoolExecutor(1, "torch", partial(prepare_thread, num_threads))
    devices = build_devices(config, device, logs, num_threads, cluster.ranks(device, logs))
    async with _closed_at_the_end(loops, devices, torch_thread):
        with ExitStack() as starting:
            starting.enter_context(progress.phase("starting the servers and loading the model"))
            loading = in_thread(
                torch_thread, load_checked, config, devices, checkpoint, progress.note
            )
            policy, _ = await asyncio.gather(loading, _start(loops, logs, progress.note))
            parts = EngineParts(
                config=config,
                policy=policy,
                weights=devices.weights(policy) if policy else None,
                torch_thread=torch_thread,
                logs=logs,
                checkpoint=checkpoint,
                notify=progress.note,
                servers=servers,
                cluster=cluster,
            )
            async with _opened_rollout(parts, loops, known_sets, verdicts) as rollout:
                starting.close()
                yield Components(
                    config=config,
                    policy=policy,
                    torch_thread=torch_thread,
                    devices=devices,
                    rollout=rollout,
                )


def _build_loops(
    config: RunConfig, cluster: Cluster, servers: ServerProvider, logs: Path
) -> Mapping[str, EpisodeLoop]:
    return {
        name: cluster.loop(logs) or LocalLoop(each, servers.host(each, _folder_of(name, logs)))
        for name, each in config.environments.items()
    }


def _folder_of(env: str, folder: Path) -> Path:
    """Return the folder for an environment's files: a subfolder, except for the first one."""
    return folder / "beside" / env if env else folder


@asynccontextmanager
async def _closed_at_the_end(
    loops: Mapping[str, EpisodeLoop], devices: Devices, torch_thread: ThreadPoolExecutor
) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await asyncio.shield(asyncio.to_thread(devices.close))
        await asyncio.shield(run_all(loop.close() for loop in loops.values()))
        torch_thread.shutdown(wait=True, cancel_futures=True)


@asynccontextmanager
async def _opened_rollout(
    parts: EngineParts,
    loops: Mapping[str, EpisodeLoop],
    known_sets: Mapping[str, KnownSets],
    verdicts: Sequence[Path],
) -> AsyncIterator[RolloutContext]:
    async with opened_engine(parts) as engine, AsyncExitStack() as stack:
        contexts = {}
        for name, config in parts.config.environments.items():
            own = replace(parts, config=config, logs=_folder_of(name, parts.logs))
            answers = [_folder_of(name, each) for each in verdicts]
            opened = _opened_environment(own, engine, loops[name], known_sets[name], answers)
            context = await stack.enter_async_context(opened)
            if name:
                context = replace(context, splits=context.splits.named(name))
            contexts[name] = context
        yield replace(contexts[""], parts=contexts) if len(contexts) > 1 else contexts[""]


@asynccontextmanager
async def _opened_environment(
    parts: EngineParts,
    engine: Engine,
    loop: EpisodeLoop,
    known_sets: KnownSets,
    verdicts: Sequence[Path],
) -> AsyncIterator[RolloutContext]:
    """Build the rollout context of one environment; its tasks may come from its servers."""
    config, logs = parts.config, parts.logs
    async with open_scorer(config, *verdicts, log=logs / "judge.log") as scorer:
        chat = parts.policy.chat if parts.policy else None
        await loop.prepare(chat)
        splits = await loop.open_splits(known_sets)
        # In a thread, because OpenEnv's capture proxy takes seconds to import.
        open_agents = await asyncio.to_thread(load, block_types("agent")[config.agent.type].build)
        async with open_agents(config, loop, logs, parts.notify) as agents:
            yield RolloutContext(
                env=config.env,
                loop=loop,
                splits=splits,
                chat=chat,
                engine=engine,
                scorer=scorer,
                agents=agents,
                roles=build_roles(
                    config, config.env.players.roles if config.env.players else {}, engine
                ),
            )


async def _start(
    loops: Mapping[str, EpisodeLoop], logs: Path, notify: Callable[[str], None]
) -> None:
    async with reporting_long_waits(
        f"waiting for the environment's servers (logs: {logs})", notify
    ):
        await run_all(loop.start() for loop in loops.values())


@asynccontextmanager
async def learner_alone(config: RunConfig, logs: Path) -> AsyncIterator[Components]:
    """Build only the learner's components, to train on recorded episodes."""
    device = select_device(config.device)
    num_threads = config.num_threads or len(usable_cores())
    nodes = build_cluster(config).ranks(device, logs)
    devices = build_devices(config, device, logs, num_threads, nodes)
    with (
        closing(devices),
        ThreadPoolExecutor(1, "torch", partial(prepare_thread, num_threads)) as torch_thread,
    ):
        policy = await in_thread(torch_thread, load_checked, config, devices, None, _log.warning)
        yield Components(config=config, policy=policy, torch_thread=torch_thread, devices=devices)
