"""GRPO as a stage of a run: groups become advantages, advantages an update."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.algorithms.custom_advantages import custom_advantages
from openenv_pipe.algorithms.samples import build_sample
from openenv_pipe.config.schema import AdvantageConfig, PythonAdvantageConfig
from openenv_pipe.learner.distributed.joint import build_learner
from openenv_pipe.learner.seeding import seed_step
from openenv_pipe.pipeline.checkpoints import Saver
from openenv_pipe.pipeline.components import Components
from openenv_pipe.pipeline.group_sources import GroupSource
from openenv_pipe.pipeline.journal import Journal, to_the_end
from openenv_pipe.pipeline.weight_publisher import WeightPublisher
from openenv_pipe.rollout.metrics import summarise_groups, summarise_staleness
from openenv_pipe.runs.checkpoints import Place
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.system.python_targets import bind_function
from openenv_pipe.types import Group, Sample


class ReinforceStage:
    """Learns step by step; knows how far it is."""

    def __init__(
        self,
        components: Components,
        source: GroupSource,
        publisher: WeightPublisher,
        saver: Saver,
        journal: Journal,
        folder: Path,
    ) -> None:
        self.step = 0
        self.in_step = False  # weights are between two steps: not to be saved
        self._trainer = components.config.trainer
        self._seed = components.config.seed
        self._components = components
        self._source = source
        self._publisher = publisher
        self._saver = saver
        self._journal = journal
        self._folder = folder
        journal.begin("grpo", self._trainer.steps)
        self._advantages = build_advantages(self._trainer.advantage)
        self._learner = build_learner(components.policy, components.config, components.workers)

    def load(self, checkpoint: Path) -> None:
        """Goes on from a checkpoint of this stage. Touches tensors."""
        self.step = Place.of(checkpoint).step
        self._saver.load_progress(checkpoint, self._learner.optimizer)

    async def advance(self) -> None:
        """One step, and its checkpoint if one is due."""
        started = time.perf_counter()
        seed_step(self._seed, "grpo", self.step + 1)
        groups = await self._source.groups(self.step + 1)
        await to_the_end(self._learn(groups, started))
        if self._is_due():
            await to_the_end(self._save())

    async def conclude(self) -> None:
        """No step follows: its weights stay, whether a checkpoint was due or not."""
        if self.step and not self._saver.is_saved(Place("grpo", self.step)):
            await to_the_end(self._save())
        await self._components.compute(self._saver.tidy)

    async def save_passing(self) -> None:
        """A checkpoint of where this stage is, to go on from, unless there is one."""
        if self._trainer.max_staleness:
            self._journal.note("finishing the episodes that are played ahead")
        if not self._saver.is_saved(Place("grpo", self.step)):
            await self._save(passing=not self._is_due())

    def _is_due(self) -> bool:
        is_last = self.step == self._trainer.steps
        return is_last or self.step % self._trainer.checkpoint.every == 0

    async def _save(self, *, passing: bool = False) -> None:
        await self._source.settle()
        place, optimizer = Place("grpo", self.step), self._learner.optimizer
        await self._components.compute(self._saver.save, place, optimizer, passing=passing)

    async def _learn(self, groups: Sequence[Group], started: float) -> None:
        """Updates the policy on the groups and writes down what happened, all or nothing."""
        collected = time.perf_counter()
        step = self.step + 1
        advantages = self._advantages(groups)
        path = episodes_path(self._folder, step)
        await asyncio.to_thread(write_episodes, path, groups, advantages)
        metrics = summarise_groups(groups) | summarise_staleness(
            groups, version=self._publisher.version
        )
        metrics["groups/trained"] = sum(values is not None for values in advantages)
        metrics["groups/skipped"] = sum(values is None for values in advantages)
        samples = build_samples(groups, advantages)
        self.in_step = True
        if samples:
            await self._publisher.begin_update()
            metrics |= await self._components.compute(self._learner.update, samples, step)
            await self._publisher.publish(step)
        metrics["tokens/skipped"] = metrics["tokens/sampled"] - metrics.get("tokens/trained", 0)
        metrics |= await self._publisher.metrics()
        self.step = step
        self.in_step = False
        ended = time.perf_counter()
        metrics["time/rollout_s"] = collected - started
        metrics["time/learner_s"] = ended - collected
        metrics["time/tokens_per_s"] = metrics["tokens/sampled"] / (ended - started)
        self._journal.write("grpo", step, metrics, started)


def build_advantages(
    config: AdvantageConfig,
) -> Callable[[Sequence[Group]], list[dict[int, list[float]] | None]]:
    """Build the function from a step's groups to their advantages.

    Raises ConfigError if a target cannot be used.
    """
    if isinstance(config, PythonAdvantageConfig):
        return partial(custom_advantages, bind_function("trainer.advantage", config, 1))
    return partial(
        step_advantages, baseline=config.baseline, scale=config.scale, discount=config.discount
    )


def build_samples(
    groups: Sequence[Group], advantages: Sequence[Mapping[int, list[float]] | None]
) -> list[Sample]:
    """The samples of groups that have a signal; episodes over before their first turn have none."""
    return [
        build_sample(group.id, episode, by_member[episode.member])
        for group, by_member in zip(groups, advantages, strict=True)
        if by_member is not None
        for episode in group.scored
        if episode.turns
    ]
