"""The story of a run: evaluate, warm start, evaluate, learn by reinforcement, evaluate.

The same story is told from the beginning, and from any checkpoint on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from openenv_pipe.pipeline.callbacks import Callback
from openenv_pipe.pipeline.checkpoints import Saver
from openenv_pipe.pipeline.components import Components
from openenv_pipe.pipeline.group_sources import GroupSource
from openenv_pipe.pipeline.grpo_stage import ReinforceStage
from openenv_pipe.pipeline.journal import Journal, to_the_end
from openenv_pipe.pipeline.warm_start_stage import WarmStartStage
from openenv_pipe.pipeline.weight_publisher import WeightPublisher
from openenv_pipe.runs.checkpoints import Place
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.progress import Progress


class Evaluator(Protocol):
    """Evaluates the policy as it is and keeps the reports. What is done is not done again."""

    async def baselines(self) -> None: ...

    async def stage(self, label: str, step: int) -> None: ...

    async def during(self, step: int) -> str | None:
        """Why training may end here, if it may."""
        ...


class Story:
    """The stages, in order. Everything that training writes is written from here."""

    def __init__(
        self,
        components: Components,
        source: GroupSource,
        publisher: WeightPublisher,
        folder: RunFolder,
        progress: Progress,
        *,
        evaluations: Evaluator,
        origin: Place | None = None,
        stop_after: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """origin: where the run began, of a fork. stop_after: of the steps of GRPO so many."""
        self._components = components
        self._trainer = components.config.trainer
        self._source = source
        self._publisher = publisher
        self._folder = folder.path
        self._evaluations = evaluations
        self._origin = origin
        self._stop_after = stop_after
        self._journal = Journal(components.config, folder, progress, callbacks)
        self._saver = Saver(components.config, folder, components.policy, source, progress.note)
        self._warm_start: WarmStartStage | None = None
        self._reinforce: ReinforceStage | None = None

    async def run(self, checkpoint: Path | None = None) -> str | None:
        """From the beginning, or from a checkpoint of this run on.

        Returns why it ended before its last step, if it did.
        """
        place = Place.of(checkpoint) if checkpoint else None
        if checkpoint:
            await self._publisher.begin_update()
            await self._components.compute(self._saver.load, checkpoint)
            await self._publisher.publish(self._publisher.version)
        if place == self._origin:
            await self._evaluations.baselines()
            await self._evaluations.stage("start", place.step if place else 0)
        if self._trainer.warm_start.steps and (place is None or place.stage == "warm_start"):
            reason = await self._run_warm_start(checkpoint)
            if reason is not None:
                await self._evaluations.stage("trained", 0)
                return reason
            checkpoint, place = None, Place("grpo", 0)
        if place == Place("grpo", 0) != self._origin:
            await self._evaluations.stage("warm_start", 0)
        return await self._run_grpo(checkpoint) if self._trainer.steps else None

    async def close(self) -> None:
        """Saves the weights that no checkpoint has yet, to go on from, and closes the files."""
        try:
            for stage in (self._reinforce, self._warm_start):
                if stage is not None and stage.step and not stage.in_step:
                    await stage.save_passing()
        finally:
            self._journal.close()
            await self._source.close()

    async def _run_warm_start(self, checkpoint: Path | None) -> str | None:
        stage = WarmStartStage(
            self._components,
            self._source,
            self._publisher,
            self._saver,
            self._journal,
            self._folder,
        )
        self._warm_start = stage
        if checkpoint:
            await self._components.compute(stage.load, checkpoint)
        reason = await stage.run()
        if reason is None:
            await to_the_end(self._components.compute(self._saver.save, Place("grpo", 0), None))
            self._warm_start = None
        await self._publisher.publish(0)
        return reason

    async def _run_grpo(self, checkpoint: Path | None) -> str | None:
        stage = ReinforceStage(
            self._components,
            self._source,
            self._publisher,
            self._saver,
            self._journal,
            self._folder,
        )
        if checkpoint:
            await self._components.compute(stage.load, checkpoint)
        self._reinforce = stage
        reason = None
        while stage.step < self._trainer.steps and stage.step != self._stop_after:
            reason = await self._evaluations.during(stage.step)
            if reason is not None:
                break
            await stage.advance()
            reason = await self._journal.call_back()
            if reason is not None:
                break
        best = self._trainer.checkpoint.best
        if stage.step == self._trainer.steps and best and best.metric.startswith("eval/"):
            await self._evaluations.during(stage.step)  # or the last could not be the best
        await stage.conclude()
        if stage.step != self._stop_after:
            await self._evaluations.stage("trained", stage.step)
        return reason
