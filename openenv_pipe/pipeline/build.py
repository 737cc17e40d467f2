"""Build the components of a run from its configuration, and close them at its end."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from openenv_pipe.config.schema import (
    LocalEngineConfig,
    OpenAIEngineConfig,
    PythonEngineConfig,
    RunConfig,
    VllmEngineConfig,
)
from openenv_pipe.engines.base import Engine, EngineSetup
from openenv_pipe.engines.eager import EagerEngine
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.engines.openai import ChatClient, OpenAIEngine
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.engines.vllm import LearnerFootprint, open_engine
from openenv_pipe.environments.tasks import known_splits
from openenv_pipe.environments.tasks.splits import KnownSets
from openenv_pipe.errors import PipeError
from openenv_pipe.learner.distributed.build import (
    build_policy_weights,
    build_workers,
    load_checked_policy,
)
from openenv_pipe.learner.distributed.workers import Workers
from openenv_pipe.learner.seeding import use_deterministic_kernels
from openenv_pipe.models.hub import served_source
from openenv_pipe.models.load import (
    reject_long_episodes,
    reject_unsupported_vision,
    select_device,
)
from openenv_pipe.models.memory_estimate import memory_bytes, model_shape
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.pipeline.cluster import Cluster, build_cluster
from openenv_pipe.pipeline.components import Components
from openenv_pipe.pipeline.servers import OwnServers, ServerProvider
from openenv_pipe.registry import block_types, load
from openenv_pipe.rewards import Scorer, open_scorer
from openenv_pipe.rollout import RolloutContext
from openenv_pipe.rollout.context import EpisodeLoop
from openenv_pipe.rollout.episode import LocalLoop
from openenv_pipe.system.malloc import keep_freed_memory
from openenv_pipe.system.process import usable_cores
from openenv_pipe.system.progress import Progress, reporting_long_waits
from openenv_pipe.system.python_targets import build_part
from openenv_pipe.system.resources import load_callable
from openenv_pipe.system.tasks import in_thread
from openenv_pipe.system.user_code import guarded

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
    """Build all components of a run; the servers start while the model loads. At the end of the
    block everything is closed.

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
    known_sets = await asyncio.to_thread(known_splits, config)
    servers = servers or OwnServers()
    cluster = build_cluster(config)
    loop = cluster.loop(logs) or LocalLoop(config, servers.host(config, logs))
    torch_thread = ThreadPoolExecutor(1, "torch", partial(prepare_thread, num_threads))
    workers = build_workers(config, device, logs, num_threads, cluster.ranks(device, logs))
    starting, notify = ExitStack(), progress.note
    try:
        starting.enter_context(progress.phase("starting the servers and loading the model"))
        loading = in_thread(
            torch_thread, _load_checked, config, device, workers, checkpoint, notify
        )
        policy, _ = await asyncio.gather(loading, _start(loop, logs, notify))
        weights = build_policy_weights(policy, workers) if policy else None
        async with (
            _opened_engine(
                config, policy, weights, torch_thread, logs, checkpoint, notify, servers, cluster
            ) as engine,
            open_scorer(config, *verdicts, log=logs / "judge.log") as scorer,
            _opened_rollout(
                config, loop, known_sets, policy, engine, scorer, logs, notify
            ) as rollout,
        ):
            starting.close()
            yield Components(
                config=config,
                policy=policy,
                torch_thread=torch_thread,
                workers=workers,
                rollout=rollout,
            )
    finally:
        starting.close()
        if workers:
            await asyncio.shield(asyncio.to_thread(workers.close))
        await asyncio.shield(loop.close())
        torch_thread.shutdown(wait=True, cancel_futures=True)


@asynccontextmanager
async def _opened_rollout(
    config: RunConfig,
    loop: EpisodeLoop,
    known_sets: KnownSets,
    policy: Policy | None,
    engine: Engine,
    scorer: Scorer,
    logs: Path,
    notify: Callable[[str], None],
) -> AsyncIterator[RolloutContext]:
    """Put together what episodes are played with; the tasks may depend on the servers."""
    chat = policy.chat if policy else None
    await loop.prepare(chat, reads_messages=scorer.reads_messages)
    splits = await loop.open_splits(known_sets)
    # In a thread, because OpenEnv's capture proxy takes seconds to import.
    open_agents = await asyncio.to_thread(load, block_types("agent")[config.agent.type].build)
    async with open_agents(config, loop, logs, notify) as agents:
        yield RolloutContext(
            env=config.env,
            loop=loop,
            splits=splits,
            chat=chat,
            engine=engine,
            scorer=scorer,
            agents=agents,
        )


async def _start(loop: EpisodeLoop, logs: Path, notify: Callable[[str], None]) -> None:
    async with reporting_long_waits(f"the environment's servers (logs: {logs})", notify):
        await loop.start()


@asynccontextmanager
async def learner_alone(config: RunConfig, logs: Path) -> AsyncIterator[Components]:
    """Build only the learner's components, to train on recorded episodes."""
    device = select_device(config.device)
    num_threads = config.num_threads or len(usable_cores())
    nodes = build_cluster(config).ranks(device, logs)
    workers = build_workers(config, device, logs, num_threads, nodes)
    with (
        closing(workers) if workers else nullcontext(),
        ThreadPoolExecutor(1, "torch", partial(prepare_thread, num_threads)) as torch_thread,
    ):
        policy = await in_thread(
            torch_thread, _load_checked, config, device, workers, None, _log.warning
        )
        yield Components(config=config, policy=policy, torch_thread=torch_thread, workers=workers)


def _load_checked(
    config: RunConfig,
    device: torch.device,
    workers: Workers | None,
    checkpoint: Path | None,
    notify: Callable[[str], None],
) -> Policy | None:
    """Load the model, and check its forward pass and its number of positions.

    Returns None if the engine needs no model in this process. Raises ConfigError.
    """
    if not config.engine.capabilities.needs_tokenizer:
        return None
    reject_unsupported_vision(config)
    policy, reason = load_checked_policy(config, device, workers, checkpoint)
    if reason is not None:
        model = config.model.label
        notify(f"model {model} does not support packed rows ({reason}); training pads samples")
    if isinstance(config.engine, LocalEngineConfig) and not policy.is_fast:
        skipped = [f"{name}: {why}" for name, why in policy.samplers_left_out.items()]
        _log.info("sampling is %s (not %s)", policy.sampler, "; not ".join(skipped))
    reject_long_episodes(config, policy.model)
    if config.model.history == "auto" and policy.chat.history == "rerender":
        notify(
            "the chat template rewrites earlier turns, so it renders every prompt anew "
            "(model.history=rerender), and a sample begins wherever it changes something; a "
            "model.chat_template that keeps earlier turns is cheaper"
        )
    return policy


@asynccontextmanager
async def _opened_engine(
    config: RunConfig,
    policy: Policy | None,
    weights: PolicyWeights | None,
    torch_thread: ThreadPoolExecutor,
    logs: Path,
    checkpoint: Path | None,
    notify: Callable[[str], None],
    servers: ServerProvider,
    cluster: Cluster,
) -> AsyncIterator[Engine]:
    """Build the engine, and close it at the end of the block."""
    engine = config.engine
    if isinstance(engine, PythonEngineConfig):
        setup = EngineSetup(config=config, policy=policy, executor=torch_thread, logs=logs)
        built = build_part("engine", engine, Engine, setup)
        passed = (PipeError, torch.OutOfMemoryError)
        used = guarded(built, f"engine.target={engine.target!r}", passed)
        is_context = isinstance(built, AbstractAsyncContextManager)
        async with cast(AbstractAsyncContextManager[Any], used) if is_context else nullcontext():
            yield used
        return
    if isinstance(engine, OpenAIEngineConfig):
        async with ChatClient(engine, cache_dir=engine.cache_dir) as client:
            yield OpenAIEngine(engine, client)
        return
    assert policy is not None and weights is not None
    if isinstance(engine, LocalEngineConfig):
        with _local_engine(config, engine, policy, torch_thread) as local:
            yield local
    elif isinstance(engine, VllmEngineConfig):
        whole_checkpoint = checkpoint is not None and not config.model.lora.rank
        async with open_engine(
            engine,
            weights,
            source=None if whole_checkpoint else served_source(config.model),
            footprint=_footprint(config, policy),
            logs=logs,
            executor=torch_thread,
            notify=notify,
            make_processes=servers.vllm_processes,
            make_on_nodes=cluster.vllm_servers(),
        ) as opened:
            yield opened
    else:
        yield ScriptedEngine(load_callable(engine.policy))


@contextmanager
def _local_engine(
    config: RunConfig, engine: LocalEngineConfig, policy: Policy, torch_thread: ThreadPoolExecutor
) -> Iterator[LocalEngine]:
    """Build the local engine, and end its threads at the end of the block.

    It has threads of its own if its forward pass is for one thread each, or if `max_staleness` lets
    it sample while the learner works, for which it also gets a copy of the policy.
    """
    num_threads = config.num_threads or len(usable_cores())
    twin = policy.twin() if config.trainer.max_staleness else None
    model = twin or policy
    with ExitStack() as threads:
        executor: ThreadPoolExecutor = torch_thread
        if model.is_fast:
            prepare = partial(prepare_thread, 1)
            executor = threads.enter_context(ThreadPoolExecutor(num_threads, "sampler", prepare))
        elif twin:
            prepare = partial(prepare_thread, num_threads)
            executor = threads.enter_context(ThreadPoolExecutor(1, "sampler", prepare))
        kind = LocalEngine if config.agent.plays_on_demand else EagerEngine
        yield kind(
            model,
            max_episodes=engine.max_batch or sys.maxsize,  # The host has a limit of its own.
            executor=executor,
            in_batches=model.is_fast,
            refresh=partial(twin.follow, policy) if twin else None,
        )


def _footprint(config: RunConfig, policy: Policy) -> LearnerFootprint:
    """Return the learner's use of this machine's GPUs."""
    if policy.device.type != "cuda":
        return LearnerFootprint(on_gpu=False, servers_elsewhere=config.cluster.serves_on_nodes)
    shape = model_shape(policy.model.config.to_dict(), policy.num_parameters)
    needed = memory_bytes(shape, config, in_one_memory=False) if shape else {}
    return gpu_footprint(config, sum(needed.values()))


def gpu_footprint(config: RunConfig, needs_bytes: int) -> LearnerFootprint:
    """Return the footprint of a learner on this machine's first GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]
    return LearnerFootprint(
        on_gpu=True,
        free_gpus=names[config.ranks_per_node :],
        gpu_bytes=torch.cuda.get_device_properties(torch.device("cuda")).total_memory,
        needs_bytes=needs_bytes,
        plays_ahead=config.trainer.max_staleness > 0,
        servers_elsewhere=config.cluster.serves_on_nodes,
    )


def prepare_thread(num_threads: int) -> None:
    """Make torch deterministic in this thread: fixed number of threads, deterministic kernels."""
    torch.set_num_threads(num_threads)
    use_deterministic_kernels()
    keep_freed_memory()
