"""The warm start as a stage of a run: a scripted policy plays, the model imitates."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from openenv_pipe.algorithms.samples import build_sample
from openenv_pipe.learner.seeding import seed_step
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.pipeline.checkpoints import Saver
from openenv_pipe.pipeline.components import Components
from openenv_pipe.pipeline.group_sources import GroupSource
from openenv_pipe.pipeline.journal import Journal, to_the_end
from openenv_pipe.pipeline.weight_publisher import WeightPublisher
from openenv_pipe.runs.checkpoints import Place
from openenv_pipe.runs.episodes import episodes_path, read_episodes, write_episodes
from openenv_pipe.types import Group, Sample


class WarmStartStage:
    """Imitates step by step; knows how far it is."""

    def __init__(
        self,
        components: Components,
        source: GroupSource,
        publisher: WeightPublisher,
        saver: Saver,
        journal: Journal,
        folder: Path,
    ) -> None:
        trainer = components.config.trainer
        self.step = 0
        self.in_step = False  # weights are between two steps: not to be saved
        self._every = trainer.checkpoint.every
        self._num_steps = trainer.warm_start.steps
        self._components = components
        self._source = source
        self._publisher = publisher
        self._saver = saver
        self._journal = journal
        self._episodes = episodes_path(folder, 0)
        self._stage = WarmStart(
            components.policy,
            trainer.warm_start,
            tokens_per_batch=trainer.tokens_per_batch,
            seed=components.config.seed,
        )

    def load(self, checkpoint: Path) -> None:
        """Goes on from a checkpoint of this stage. Touches tensors."""
        self.step = Place.of(checkpoint).step
        self._saver.load_progress(checkpoint, self._stage.optimizer, self._stage)

    async def run(self) -> str | None:
        """Take the steps that are left, with a checkpoint now and then to go on from.

        Returns why a callback stopped it, if one did.
        """
        samples = _build_samples(await self._demonstrations())
        self._journal.begin("warm_start", self._num_steps)
        await self._publisher.begin_update()
        while self.step < self._num_steps:
            await to_the_end(self._imitate(samples))
            if self.step % self._every == 0 and self.step < self._num_steps:
                await to_the_end(self.save_passing())
            reason = await self._journal.call_back()
            if reason is not None:
                return reason
        return None

    async def save_passing(self) -> None:
        """A checkpoint of where this stage is, to go on from, unless there is one."""
        place, stage = Place("warm_start", self.step), self._stage
        if not self._saver.is_saved(place):
            await self._components.compute(
                self._saver.save, place, stage.optimizer, warm_start=stage, passing=True
            )

    async def _demonstrations(self) -> list[Group]:
        """Played once in a run's life."""
        if not self._episodes.exists():
            groups = await self._source.demonstrations()
            await asyncio.to_thread(write_episodes, self._episodes, groups)
        return await asyncio.to_thread(read_episodes, self._episodes)

    async def _imitate(self, samples: Sequence[Sample]) -> None:
        started = time.perf_counter()
        seed_step(self._components.config.seed, "warm_start", self.step + 1)
        self.in_step = True
        metrics = await self._components.compute(self._stage.step, samples)
        self.step += 1
        self.in_step = False
        self._journal.write("warm_start", self.step, metrics, started)


def _build_samples(groups: Sequence[Group]) -> list[Sample]:
    return [
        build_sample(group.id, episode, [1.0] * len(episode.turns))
        for group in groups
        for episode in group.scored
        if episode.turns
    ]
