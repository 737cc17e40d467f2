"""The warm start as a stage of a run: the model imitates demonstrations."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.learner.seeding import seed_step
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.pipeline.demonstrations import too_long_to_play
from openenv_pipe.pipeline.metrics_log import finish_despite_cancel
from openenv_pipe.pipeline.stage import StageContext
from openenv_pipe.runs.checkpoints import WARM_START_END, StageStep
from openenv_pipe.runs.episodes import episodes_path, read_episodes, write_episodes
from openenv_pipe.system.progress import long_phase
from openenv_pipe.types import Sample


class WarmStartStage:
    """Runs the steps of the warm start and counts them."""

    def __init__(self, context: StageContext) -> None:
        self.stop_reason: str | None = None  # why a callback stopped it before its last step
        self._context = context
        self._config = context.components.config
        self._num_steps = self._config.trainer.warm_start.steps
        self._step = 0
        self._in_step = False  # True while a step changes the weights, which cannot be saved then
        self._episodes = episodes_path(context.folder, 0)
        self._warm_start: WarmStart  # from `run` on

    def is_done(self, at: StageStep | None) -> bool:
        return self._num_steps == 0 or (at is not None and at.stage == "grpo")

    async def run(self, at: StageStep | None, checkpoint: Path | None) -> StageStep:
        """Run the remaining steps, and save the weights that GRPO starts with.

        If a callback stops the run, the result is the step of the warm start that was reached.
        """
        context, trainer = self._context, self._config.trainer
        policy, devices = context.components.policy, context.components.devices
        assert policy is not None
        self._warm_start = await context.components.compute(devices.warm_start, policy)
        if checkpoint:
            await context.components.compute(self._load, checkpoint)
        # A run gets its demonstrations once; later attempts read them.
        if not self._episodes.exists():
            async with long_phase(context.progress, "collecting the episodes to imitate") as count:
                groups = await context.source.demonstrations(context.progress.note, count)
            await asyncio.to_thread(write_episodes, self._episodes, groups)
        groups = await asyncio.to_thread(read_episodes, self._episodes)
        episodes = [(group.id, episode) for group in groups for episode in group.scored]
        turns = [turn for _, episode in episodes for turn in episode.agent_turns]
        if warning := too_long_to_play(turns, self._config):
            context.progress.note(warning)
        samples = [
            sample
            for group_id, episode in episodes
            for sample in episode_samples(group_id, episode, [1.0] * len(episode.turns))
        ]
        context.progress.stage("warm_start", self._num_steps)
        await context.source.begin_update()
        while self._step < self._num_steps and self.stop_reason is None:
            await finish_despite_cancel(self._imitate(samples))
            is_due = self._step % trainer.checkpoint.every == 0 or context.saver.is_overdue()
            if is_due and self._step < self._num_steps:
                await finish_despite_cancel(self.save_unsaved())
            self.stop_reason = await context.metrics_log.call_back()
        if self.stop_reason is not None:
            await finish_despite_cancel(self.save_unsaved())
            await context.source.publish(0)
            return StageStep("warm_start", self._step)
        save = context.components.compute(context.saver.save, WARM_START_END, None)
        await finish_despite_cancel(save)
        await context.source.publish(0)
        return WARM_START_END

    async def save_unsaved(self) -> None:
        at, context = StageStep("warm_start", self._step), self._context
        if self._step and not self._in_step and not context.saver.is_saved(at):
            await context.components.compute(
                context.saver.save,
                at,
                self._warm_start.optimizer,
                warm_start=self._warm_start,
                passing=True,
            )

    def _load(self, checkpoint: Path) -> None:
        """Load the progress of this stage from a checkpoint. Call it in torch's thread."""
        self._step = StageStep.of(checkpoint).step
        optimizer = self._warm_start.optimizer
        self._context.saver.load_progress(checkpoint, optimizer, self._warm_start)

    async def _imitate(self, samples: Sequence[Sample]) -> None:
        started = time.perf_counter()
        seed_step(self._config.seed, "warm_start", self._step + 1)
        self._in_step = True
        metrics = await self._context.components.compute(self._warm_start.step, samples)
        self._step += 1
        self._in_step = False
        self._context.metrics_log.write("warm_start", self._step, metrics, started)
