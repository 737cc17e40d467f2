"""Open the engines that the core has, and close them at the end of a run.

The `build` of an engine's type is called with an `EngineParts`, and returns an asynchronous context
manager of an `Engine`. Its `check` is called with the run's configuration before a run that plays
episodes, its `trial` by `openenv-pipe check`; both return a line about what they found, and raise
ConfigError.
"""

import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from openenv_pipe.config.schema import (
    LocalEngineConfig,
    OpenAIEngineConfig,
    PythonEngineConfig,
    RunConfig,
    ScriptedEngineConfig,
    VllmEngineConfig,
)
from openenv_pipe.engines.base import Engine, EngineSetup
from openenv_pipe.engines.checked import CheckedEngine
from openenv_pipe.engines.eager import EagerEngine
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.engines.openai import ChatClient, OpenAIEngine
from openenv_pipe.engines.scripted import ScriptedEngine, replies_of
from openenv_pipe.engines.vllm import LearnerFootprint, open_engine
from openenv_pipe.engines.vllm.server_memory import gpu_footprint
from openenv_pipe.errors import PipeError
from openenv_pipe.learner.seeding import prepare_thread
from openenv_pipe.models.hub import served_source
from openenv_pipe.models.memory_estimate import memory_bytes, model_shape
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.teacher import find_teacher_shapes
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.pipeline.cluster import Cluster
from openenv_pipe.pipeline.opponents import load_opponents
from openenv_pipe.pipeline.servers import ServerProvider
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.process import usable_cores
from openenv_pipe.system.python_targets import build_part, check_part
from openenv_pipe.system.resources import load_callable
from openenv_pipe.system.tasks import in_thread
from openenv_pipe.system.user_code import guarded


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What a run has for its engine.

    `policy` and `weights` are None if the engine's capabilities need no model in this process.
    """

    config: RunConfig
    policy: Policy | None
    weights: PolicyWeights | None
    torch_thread: ThreadPoolExecutor  # the only one that may touch the policy
    logs: Path
    checkpoint: Path | None  # that the policy's weights come from; None: the base model
    notify: Callable[[str], None]
    servers: ServerProvider
    cluster: Cluster


def opened_engine(parts: EngineParts) -> AbstractAsyncContextManager[Engine]:
    """Return the engine that `engine.type` names, opened for the length of a block."""
    build = load(block_types("engine")[parts.config.engine.type].build)
    return cast(AbstractAsyncContextManager[Engine], build(parts))


@asynccontextmanager
async def open_local(parts: EngineParts) -> AsyncIterator[Engine]:
    """Open the local engine.

    It has threads of its own for several batches at once, and if `max_staleness` lets it sample
    while the learner works; then it also gets a copy of the policy. Checkpoints that play against
    the policy are further copies.
    """
    config, policy, engine = parts.config, parts.policy, parts.config.engine
    assert isinstance(engine, LocalEngineConfig) and policy is not None
    num_threads = config.num_threads or len(usable_cores())
    twin = policy.twin() if config.trainer.max_staleness else None
    model = twin or policy
    opponents = await in_thread(parts.torch_thread, load_opponents, config, policy)
    with ExitStack() as threads:
        executor = parts.torch_thread
        if (batch_executor := batch_threads(model, num_threads)) is not None:
            threads.enter_context(batch_executor)
        if batch_executor is not None and model.is_small:
            executor = batch_executor
        elif twin:
            prepare = partial(prepare_thread, num_threads)
            executor = threads.enter_context(ThreadPoolExecutor(1, "samples", prepare))
        kind = LocalEngine if config.agent.plays_on_demand else EagerEngine
        yield kind(
            model,
            max_episodes=engine.max_batch or sys.maxsize,  # The host has a limit of its own.
            executor=executor,
            batch_executor=batch_executor,
            refresh=partial(twin.follow, policy) if twin else None,
            sampling=engine.sampling,
            frozen=opponents,
        )


def batch_threads(model: Policy, num_threads: int) -> ThreadPoolExecutor | None:
    """Return what samples several batches of a model at once; None: it is sampled in one batch.

    Operations of small models are too short for several threads, so each batch has one. Those of
    larger models are divided among threads, which wait for each other at each operation: with a
    second batch there is work for them meanwhile.
    """
    if not model.samples_in_batches:
        return None
    num_batches = num_threads if model.is_small else min(2, num_threads)
    prepare = partial(prepare_thread, num_threads // num_batches)
    return ThreadPoolExecutor(num_batches, "sampler", prepare)


@asynccontextmanager
async def open_vllm(parts: EngineParts) -> AsyncIterator[Engine]:
    """Start the vLLM servers, or connect to them, and publish the policy to them."""
    config, engine = parts.config, parts.config.engine
    assert isinstance(engine, VllmEngineConfig)
    assert parts.policy is not None and parts.weights is not None
    whole_checkpoint = parts.checkpoint is not None and not config.model.lora.rank
    async with open_engine(
        engine,
        parts.weights,
        source=None if whole_checkpoint else served_source(config.model),
        footprint=_footprint(config, parts.policy),
        logs=parts.logs,
        executor=parts.torch_thread,
        notify=parts.notify,
        make_processes=parts.servers.vllm_processes,
        make_on_nodes=parts.cluster.vllm_servers(),
    ) as opened:
        yield opened


def _footprint(config: RunConfig, policy: Policy) -> LearnerFootprint:
    """Return the learner's use of this machine's GPUs."""
    if policy.device.type != "cuda":
        return LearnerFootprint(on_gpu=False, servers_elsewhere=config.cluster.serves_on_nodes)
    shape = model_shape(policy.model.config.to_dict(), policy.num_parameters)
    if shape is None:
        return gpu_footprint(config, 0)
    teachers = find_teacher_shapes(config)
    needed = memory_bytes(shape, config, in_one_memory=False, teachers=teachers)
    return gpu_footprint(config, sum(needed.values()))


@asynccontextmanager
async def open_openai(parts: EngineParts) -> AsyncIterator[Engine]:
    engine = parts.config.engine
    assert isinstance(engine, OpenAIEngineConfig)
    async with ChatClient(engine, cache_dir=engine.cache_dir) as client:
        yield OpenAIEngine(engine, client)


def check_scripted(config: RunConfig) -> str:
    """Return which policy plays. Raises ConfigError if it cannot be loaded or called."""
    assert isinstance(config.engine, ScriptedEngineConfig)
    replies_of(load_callable(config.engine.policy))
    return config.engine.policy


def open_scripted(parts: EngineParts) -> AbstractAsyncContextManager[Engine]:
    engine = parts.config.engine
    assert isinstance(engine, ScriptedEngineConfig)
    return nullcontext(ScriptedEngine(load_callable(engine.policy)))


@asynccontextmanager
async def open_python(parts: EngineParts) -> AsyncIterator[Engine]:
    """Build an engine of the user's, and enter it if it is a context manager."""
    engine = parts.config.engine
    assert isinstance(engine, PythonEngineConfig)
    setup = EngineSetup(
        config=parts.config, policy=parts.policy, executor=parts.torch_thread, logs=parts.logs
    )
    built = build_part("engine", engine, Engine, setup)
    passed = (PipeError, torch.OutOfMemoryError)
    name = f"engine.target={engine.target!r}"
    used = guarded(built, name, passed)
    vocabulary_size = parts.weights.vocabulary_size if parts.weights is not None else None
    is_context = isinstance(built, AbstractAsyncContextManager)
    async with cast(AbstractAsyncContextManager[Any], used) if is_context else nullcontext():
        yield cast(Engine, CheckedEngine(used, name, vocabulary_size))


def check_python(config: RunConfig) -> str:
    """Check that the user's engine can be called as the pipeline calls it."""
    assert isinstance(config.engine, PythonEngineConfig)
    check_part("engine", config.engine, Engine, 1)
    return ""


def describe_python(config: RunConfig) -> str:
    assert isinstance(config.engine, PythonEngineConfig)
    purpose = "training" if config.engine.capabilities.can_train else "evaluation"
    return f"{config.engine.target}, for {purpose}"
