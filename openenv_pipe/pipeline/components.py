"""What a run works with: a learner's bench, and the parts with which episodes are played.

Refused here: making them and ending them, which is `assembly`'s; going on when everything fails.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.adapters import Adapter
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.tasks import Splits
from openenv_pipe.errors import FailureError, TrainingError
from openenv_pipe.learner.distributed.workers import Workers
from openenv_pipe.models.policy import Policy
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import Chat, Collector
from openenv_pipe.system.resources import load_callable
from openenv_pipe.types import Group, Status, Task

Result = TypeVar("Result")
DEATH_SEEN_WITHIN_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What a learner works with: torch works in one thread, the event loop in another."""

    config: RunConfig
    policy: Policy | None  # None: engine=openai, whose model is elsewhere
    torch_thread: ThreadPoolExecutor
    workers: Workers | None = None  # with trainer.devices above 1: they start when they are needed

    async def compute(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Runs torch work in its thread, while sessions stay alive on the event loop."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.torch_thread, partial(function, *args, **kwargs))
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"out of memory on {self.policy.device}: {error}; lower trainer.tokens_per_batch "
                "(the learner) or engine.max_batch (the sampler), set "
                "model.activation_checkpointing=true, train with model.lora.rank=16, and with that "
                "model.quantization=nf4"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts(Bench):
    """What a run works with: the learner's bench, and all that episodes are played with."""

    host: Host
    adapter: Adapter
    tasks: Splits
    chat: Chat
    engine: Engine
    scorer: Scorer

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
            chat=self.chat,
            engine=engine or self.engine,
        )
        num_deaths = self.host.num_deaths
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
        if not await self._has_lost_a_server(groups, num_deaths):
            _refuse_total_failure(groups)
        return groups

    async def _has_lost_a_server(self, groups: list[Group], num_deaths: int) -> bool:
        """Whether all episodes failed and a server died meanwhile: the host's budget is for that.

        Who supervises the server sees its end a moment after the episodes do.
        """
        if not all(episode.failed for group in groups for episode in group.episodes):
            return False
        latest = time.monotonic() + DEATH_SEEN_WITHIN_S
        while self.host.num_deaths == num_deaths and time.monotonic() < latest:
            await asyncio.sleep(DEATH_SEEN_WITHIN_S / 20)
        return self.host.num_deaths > num_deaths

    def scripted_engine(self, policy: str) -> ScriptedEngine:
        return ScriptedEngine(load_callable(policy), self.chat)


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
