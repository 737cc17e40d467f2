"""Play the evaluations of a run once each, save their reports, and show them."""

from collections.abc import Awaitable, Callable

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.pipeline.evaluate import (
    evaluate_during,
    evaluate_model,
    play_baselines,
    seed_warning,
    stop_reason,
)
from openenv_pipe.reports.eval_table import eval_warnings, scores_text
from openenv_pipe.rollout import RolloutContext
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import (
    BASELINE,
    DURING,
    Evaluation,
    read_during,
    read_reports,
    read_stages,
    save_evaluation,
)
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.progress import Progress
from openenv_pipe.trackers.build import Trackers


class Evaluations:
    """Plays those evaluations that the run folder does not have yet."""

    def __init__(
        self,
        config: RunConfig,
        rollout: RolloutContext,
        folder: RunFolder,
        progress: Progress,
        clear_engine: Callable[[], Awaitable[None]],
        trackers: Trackers | None,
    ) -> None:
        """clear_engine: prepares the engine for an evaluation."""
        self._clear_engine = clear_engine
        self._trackers = trackers
        self._config = config
        self._rollout = rollout
        self._folder = folder.path
        self._progress = progress
        self._during = config.eval.during
        self._num_warnings = 0  # of the evaluation before; those during training repeat none

    async def check_seed(self) -> None:
        """Show a warning if a task does not begin the same twice."""
        if (warning := await seed_warning(self._rollout)) is not None:
            self._progress.note(f"eval: {warning}")

    async def baselines(self) -> None:
        """Evaluate the scripted policies."""
        names = {f"{BASELINE}{name}" for name in self._config.env.baselines}
        if not names <= set(read_reports(self._folder)):
            shown = ", ".join(self._config.env.baselines)
            with self._progress.phase(f"playing the baselines: {shown}"):
                self._keep(await play_baselines(self._config, self._rollout))

    async def stage(self, label: str, step: int | None) -> None:
        """Evaluate the current model, after `step` steps of GRPO."""
        done = read_stages(self._folder).get(label)
        if done is None or done.step != step:
            with self._progress.phase(f"evaluating {label}"):
                await self._clear_engine()
                self._keep(await evaluate_model(self._config, self._rollout, label, step))

    async def during(self, step: int) -> str | None:
        """Evaluate between two steps if one is due; return why training ends, if it does."""
        if not self._during.every or step == 0 or step % self._during.every:
            return None
        done = [report for report in read_during(self._folder) if report.step == step]
        if not done:
            with self._progress.phase(f"evaluating step {step}"):
                await self._clear_engine()
                evaluation = await evaluate_during(self._config, self._rollout, step)
                self._keep([evaluation])
            done = [evaluation.report]
        return stop_reason(self._config, done[-1])

    def _keep(self, evaluations: list[Evaluation]) -> None:
        """Save, show and track evaluations. If the first is saved, so are the others."""
        for evaluation in reversed(evaluations):
            save_evaluation(self._folder, evaluation)
        for evaluation in evaluations:
            self._notify(evaluation.report)
            if self._trackers is not None:
                self._trackers.log_evaluation(evaluation)

    def _notify(self, report: EvalReport) -> None:
        self._progress.note(f"eval {report.label}: {report.error or scores_text(report)}")
        warnings = eval_warnings(report, self._folder)
        is_repeated = report.label.startswith(DURING) and len(warnings) == self._num_warnings
        for warning in () if is_repeated else warnings:
            self._progress.note(f"eval {report.label}: {warning}")
        self._num_warnings = len(warnings)


class NoEvaluations:
    """The evaluations of a run without an environment: none."""

    async def check_seed(self) -> None:
        """Do nothing."""

    async def baselines(self) -> None:
        """Do nothing."""

    async def stage(self, label: str, step: int | None) -> None:
        """Do nothing."""

    async def during(self, step: int) -> str | None:
        """Return None: training continues."""
        return None
