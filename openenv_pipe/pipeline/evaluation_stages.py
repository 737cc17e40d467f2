"""The evaluations before, between and after the stages of training, as stages of a run."""

from pathlib import Path

from openenv_pipe.pipeline.stage import StageContext
from openenv_pipe.runs.checkpoints import WARM_START_END, StageStep


class EvaluationStage:
    """Evaluates the policy once, under a label."""

    label: str

    def __init__(self, context: StageContext, origin: StageStep | None = None) -> None:
        """origin: the step that a fork starts from; None for other runs."""
        self._evaluator = context.evaluator
        self._origin = origin

    async def run(self, at: StageStep | None, checkpoint: Path | None) -> StageStep | None:
        await self._evaluator.stage(self.label, at.step if at and at.stage == "grpo" else 0)
        return at

    async def save_unsaved(self) -> None:
        """Do nothing: an evaluation changes no weights."""


class StartEvaluation(EvaluationStage):
    """Checks the tasks, and evaluates scripted policies and the policy that the run starts with."""

    label = "start"

    def is_done(self, at: StageStep | None) -> bool:
        return at != self._origin

    async def run(self, at: StageStep | None, checkpoint: Path | None) -> StageStep | None:
        await self._evaluator.check_tasks()
        await self._evaluator.baselines()
        return await super().run(at, checkpoint)


class WarmStartEvaluation(EvaluationStage):
    label = "warm_start"

    def is_done(self, at: StageStep | None) -> bool:
        # A fork that starts from there is evaluated as `start`.
        return at != WARM_START_END or self._origin == WARM_START_END


class FinalEvaluation(EvaluationStage):
    label = "trained"

    def __init__(self, context: StageContext, stop_after: int | None) -> None:
        """stop_after: the step after which this attempt ends without an evaluation, if any."""
        super().__init__(context)
        self._stop_after = stop_after
        self._has_grpo = context.components.config.trainer.steps > 0

    def is_done(self, at: StageStep | None) -> bool:
        if at is None:
            return True
        if at.stage == "warm_start":  # stopped there
            return False
        return not self._has_grpo or at.step == self._stop_after
