"""The live parts of a run, made from its configuration and ended with it."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from openenv_pipe.adapters import Adapter, adapter_for
from openenv_pipe.canary import check_forward
from openenv_pipe.config.schema import LocalEngineConfig, RunConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.errors import ConfigError, FailureError, TrainingError
from openenv_pipe.hosts import build_host
from openenv_pipe.hosts.base import Host
from openenv_pipe.learner.load import load_policy, select_device
from openenv_pipe.learner.policy import Policy
from openenv_pipe.resources import load_callable
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import Collector
from openenv_pipe.tasks import Splits, known_splits, open_splits
from openenv_pipe.types import Group, Status, Task

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a run works with. All torch work happens in one thread, the event loop in another."""

    config: RunConfig
    host: Host
    adapter: Adapter
    tasks: Splits
    policy: Policy
    engine: Engine
    scorer: Scorer
    torch_thread: ThreadPoolExecutor

    async def compute(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Runs torch work in its thread, while sessions stay alive on the event loop."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.torch_thread, partial(function, *args, **kwargs))
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"out of memory on {self.policy.device}: {error}; lower trainer.tokens_per_batch "
                "(the learner) or engine.max_batch (the sampler), or train with model.lora.rank=16"
            ) from error

    async def collect(
        self,
        tasks: list[Task],
        *,
        group_size: int,
        temperature: float,
        label: str,
        engine: Engine | None = None,
    ) -> list[Group]:
        """Groups of scored episodes, played by the policy or by another engine."""
        collector = Collector(
            env=self.config.env,
            host=self.host,
            adapter=self.adapter,
            chat=self.policy.chat,
            engine=engine or self.engine,
        )
        groups = await collector.collect(
            tasks,
            group_size=group_size,
            temperature=temperature,
            seed=self.config.seed,
            label=label,
        )
        for group in groups:
            for episode in group.episodes:
                self.scorer.score(episode)
        _refuse_total_failure(groups)
        return groups

    def scripted_engine(self, policy: str) -> ScriptedEngine:
        return ScriptedEngine(load_callable(policy), self.policy.chat)


@asynccontextmanager
async def assembled(
    config: RunConfig, logs: Path, checkpoint: Path | None = None
) -> AsyncIterator[Parts]:
    """The parts, started; environment servers and the model side by side.

    Raises ConfigError and HostError. Whatever happens inside, nothing outlives the block.
    """
    device = select_device(config.device)
    num_threads = config.num_threads or _num_cores()
    scorer = Scorer(config.reward, config.env.success_reward)
    known_sets = await asyncio.to_thread(known_splits, config)
    host = build_host(config, logs)
    torch_thread = ThreadPoolExecutor(1, "torch", partial(_prepare_thread, num_threads))
    try:
        loading = asyncio.get_running_loop().run_in_executor(
            torch_thread,
            partial(
                load_policy, config.model, seed=config.seed, device=device, checkpoint=checkpoint
            ),
        )
        policy, _ = await asyncio.gather(loading, host.start())
        await asyncio.get_running_loop().run_in_executor(torch_thread, check_forward, policy)
        _refuse_short_model(config, policy)
        yield Parts(
            config=config,
            host=host,
            adapter=await adapter_for(config.env.adapter, host.urls, host.access),
            tasks=await open_splits(config, known_sets, host.urls[0], host.access),
            policy=policy,
            engine=_build_engine(config, policy, torch_thread),
            scorer=scorer,
            torch_thread=torch_thread,
        )
    finally:
        await asyncio.shield(host.close())
        torch_thread.shutdown(wait=True, cancel_futures=True)


def _refuse_total_failure(groups: list[Group]) -> None:
    """One failed episode is data; when all have failed, something is broken."""
    episodes = [episode for group in groups for episode in group.episodes]
    if episodes and all(episode.failed for episode in episodes):
        raise FailureError(
            f"all {len(episodes)} episodes failed, the first with: {episodes[0].error}; "
            "`openenv-pipe check` tries the environment alone"
        )
    if episodes and not any(episode.turns for episode in episodes):
        raise FailureError(
            f"all {len(episodes)} episodes ended before their first turn, the first with status "
            f"{episodes[0].status}; {Status.TOKEN_LIMIT} asks for a larger env.max_episode_tokens, "
            f"{Status.DONE} for other reset keywords"
        )


def _refuse_short_model(config: RunConfig, policy: Policy) -> None:
    limit = policy.max_length
    if limit is not None and config.env.max_episode_tokens > limit:
        raise ConfigError(
            f"env.max_episode_tokens={config.env.max_episode_tokens} is more than the model's "
            f"{limit} positions; lower it, or choose a model with a longer context"
        )


def _num_cores() -> int:
    """Those that this process may use, which in a container are fewer than there are."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1


def _build_engine(config: RunConfig, policy: Policy, torch_thread: ThreadPoolExecutor) -> Engine:
    if isinstance(config.engine, LocalEngineConfig):
        return LocalEngine(policy, max_episodes=config.engine.max_batch, executor=torch_thread)
    return ScriptedEngine(load_callable(config.engine.policy), policy.chat)


def _prepare_thread(num_threads: int) -> None:
    """Same bits for the same numbers: a fixed number of threads, deterministic kernels only."""
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
