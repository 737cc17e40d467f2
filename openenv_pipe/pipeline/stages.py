"""Run the stages of a run in order, from the beginning or from a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from openenv_pipe.pipeline.callbacks import Callback
from openenv_pipe.pipeline.checkpoints import Saver
from openenv_pipe.pipeline.components import Components
from openenv_pipe.pipeline.evaluation_stages import (
    FinalEvaluation,
    StartEvaluation,
    WarmStartEvaluation,
)
from openenv_pipe.pipeline.group_sources import GroupSource
from openenv_pipe.pipeline.grpo_stage import GrpoStage
from openenv_pipe.pipeline.metrics_log import MetricsLog
from openenv_pipe.pipeline.replay import Replay
from openenv_pipe.pipeline.stage import Evaluator, Stage, StageContext
from openenv_pipe.pipeline.warm_start_stage import WarmStartStage
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.progress import Progress
from openenv_pipe.trackers.build import Trackers


class StageRunner:
    """Runs those stages of a run that are not done yet."""

    def __init__(
        self,
        components: Components,
        source: GroupSource,
        folder: RunFolder,
        progress: Progress,
        *,
        evaluator: Evaluator,
        origin: StageStep | None = None,
        stop_after: int | None = None,
        callbacks: Sequence[Callback] = (),
        trackers: Trackers | None = None,
    ) -> None:
        """origin: the step a fork starts from. stop_after: stop after this step of GRPO, if any."""
        assert components.policy is not None
        config = components.config
        replay = Replay(config.trainer.replay, config.seed)
        self._context = StageContext(
            components=components,
            source=source,
            replay=replay,
            evaluator=evaluator,
            saver=Saver(config, folder, components.policy, source, replay, progress.note),
            metrics_log=MetricsLog(config, folder, progress, callbacks, trackers),
            progress=progress,
            folder=folder.path,
        )
        self._warm_start = WarmStartStage(self._context)
        self._grpo = GrpoStage(self._context, stop_after)
        self._stages: Sequence[Stage] = (
            StartEvaluation(self._context, origin),
            self._warm_start,
            WarmStartEvaluation(self._context, origin),
            self._grpo,
            FinalEvaluation(self._context, stop_after),
        )
        self._current: Stage = self._stages[0]

    async def run(self, checkpoint: Path | None = None) -> str | None:
        """Run the stages from the beginning, or from a checkpoint of this run.

        Returns the reason if the run ended before its last step.
        """
        at = None
        if checkpoint:
            at = StageStep.of(checkpoint)
            source, saver = self._context.source, self._context.saver
            await source.begin_update()
            await self._context.components.compute(saver.load, checkpoint)
            await source.publish(source.version)
        for stage in self._stages:
            if not stage.is_done(at):
                self._current = stage
                at = await stage.run(at, checkpoint)
        return self._warm_start.stop_reason or self._grpo.stop_reason

    async def close(self, *, saves: bool) -> None:
        """Close files. saves: first save weights that are in no checkpoint, for a later attempt."""
        try:
            if saves:
                await self._current.save_unsaved()
        finally:
            self._context.metrics_log.close()
            await self._context.source.close()
