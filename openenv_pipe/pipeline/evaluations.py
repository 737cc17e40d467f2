"""Play the evaluations of a run once each, save their reports, and show them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.pipeline.evaluate import (
    baseline_labels,
    evaluate_during,
    evaluate_model,
    play_baselines,
    stop_reason,
    task_warnings,
)
from openenv_pipe.pipeline.stage import Evaluator
from openenv_pipe.reports.eval_table import eval_warnings, scores_text
from openenv_pipe.rollout import RolloutContext
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import (
    BASELINE,
    DURING,
    Evaluation,
    env_of,
    read_during,
    read_reports,
    read_stages,
    save_evaluation,
)
from openenv_pipe.system.progress import Progress, long_phase
from openenv_pipe.trackers.build import Trackers


@dataclass(kw_only=True)
class Evaluations(Evaluator):
    """Plays those evaluations that the run folder does not have yet."""

    config: RunConfig
    rollout: RolloutContext
    folder: Path  # of the run
    progress: Progress
    clear_engine: Callable[[], Awaitable[None]]  # prepares the engine for an evaluation
    trackers: Trackers | None
    # In the previous evaluation, by environment; evaluations between steps do not repeat them.
    _num_warnings: dict[str, int] = field(default_factory=dict, init=False)

    async def check_tasks(self) -> None:
        for warning in await task_warnings(self.rollout):
            self.progress.note(f"eval: {warning}")

    async def baselines(self) -> None:
        labels = baseline_labels(self.config)
        if not {*labels} <= set(read_reports(self.folder)):
            shown = ", ".join(each.removeprefix(BASELINE) for each in labels)
            async with long_phase(self.progress, f"playing the baselines: {shown}") as count:
                self._keep(await play_baselines(self.config, self.rollout, count))

    async def stage(self, label: str, step: int) -> None:
        done = read_stages(self.folder).get(label)
        if done is None or done.step != step:
            async with long_phase(self.progress, f"evaluating {label}") as count:
                await self.clear_engine()
                self._keep(await evaluate_model(self.config, self.rollout, label, step, count))

    async def during(self, step: int) -> str | None:
        every = self.config.eval.during.every
        if not every or step == 0 or step % every:
            return None
        done = [report for report in read_during(self.folder) if report.step == step]
        if not done:
            async with long_phase(self.progress, f"evaluating step {step}") as count:
                await self.clear_engine()
                evaluations = await evaluate_during(self.config, self.rollout, step, count)
                self._keep(evaluations)
            done = [evaluations[0].report]
        return stop_reason(self.config, done[-1])

    def _keep(self, evaluations: list[Evaluation]) -> None:
        """Save, show and track evaluations. If the first is saved, so are the others."""
        for evaluation in reversed(evaluations):
            save_evaluation(self.folder, evaluation)
        for evaluation in evaluations:
            self._notify(evaluation.report)
            if self.trackers is not None:
                self.trackers.log_evaluation(evaluation)

    def _notify(self, report: EvalReport) -> None:
        self.progress.note(f"eval {report.label}: {report.error or scores_text(report)}")
        warnings, env = eval_warnings(report, self.folder), env_of(report.label)
        is_known = len(warnings) == self._num_warnings.get(env, 0)
        for warning in () if is_known and report.label.startswith(DURING) else warnings:
            self.progress.note(f"eval {report.label}: {warning}")
        self._num_warnings[env] = len(warnings)
