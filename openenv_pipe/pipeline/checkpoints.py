"""Save and load the checkpoints of a run, choose the best, and delete old ones."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.learner.checkpoint import load_progress, load_weights, save_progress, save_weights
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.models.policy import Policy
from openenv_pipe.pipeline.group_sources import GroupSource
from openenv_pipe.pipeline.replay import Replay
from openenv_pipe.runs.checkpoints import (
    RESUME,
    StageStep,
    all_checkpoints,
    checkpoint_path,
    is_passing,
    is_resumable,
    mark_passing,
    new_checkpoint,
    point_best,
    read_best_only,
    retain,
    unmark_passing,
    write_best_only,
)
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import read_during
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.files import read_json, write_json
from openenv_pipe.system.resources import did_you_mean

WARM_START = "warm_start.json"


class Saver:
    """Saves and loads a run's checkpoints. Call all methods in torch's thread."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        policy: Policy,
        source: GroupSource,
        replay: Replay,
        say: Callable[[str], None],
    ) -> None:
        self._config = config.trainer.checkpoint
        self._num_warm_start_steps = config.trainer.warm_start.steps
        self._folder = folder.path
        self._metrics_path = folder.metrics_path
        self._policy = policy
        self._source = source
        self._replay = replay
        self._say = say
        self._said_missing = False
        self._said_left_out = False
        self._best: tuple[int, float] | None = None  # step and value of the best checkpoint
        self._saved_at_s = time.monotonic()  # or the start, until something is saved

    def is_saved(self, at: StageStep) -> bool:
        """Return whether a run could go on from there."""
        return is_resumable(checkpoint_path(self._folder, at))

    def is_overdue(self) -> bool:
        """Return whether `every_minutes` have passed since the last checkpoint."""
        every_minutes = self._config.every_minutes
        elapsed_s = time.monotonic() - self._saved_at_s
        return every_minutes is not None and elapsed_s >= 60.0 * every_minutes

    def save(
        self,
        at: StageStep,
        optimizer: Optimizer | None,
        *,
        warm_start: WarmStart | None = None,
        passing: bool = False,
    ) -> None:
        """Save the policy and all state that the next step depends on.

        warm_start: its state is saved too; None after the warm start. passing: the checkpoint is
        only for resuming, and is deleted once there is a newer one.
        """
        if not passing:
            write_best_only(self._folder, read_best_only(self._folder) - {at.name})
        with new_checkpoint(self._folder, at) as path:
            self._save_weights(path, at)
            (path / RESUME).mkdir()
            save_progress(path / RESUME, self._policy, optimizer)
            self._source.save(path / RESUME)
            self._replay.save(path / RESUME)
            if warm_start is not None:
                write_json(path / RESUME / WARM_START, warm_start.state())
            if passing:
                mark_passing(path)
        self._saved_at_s = time.monotonic()
        self.tidy()

    def keep_last(self, at: StageStep) -> None:
        """Keep the checkpoint of the last step, if an earlier attempt wrote it to resume from."""
        if is_passing(path := checkpoint_path(self._folder, at)):
            write_best_only(self._folder, read_best_only(self._folder) - {at.name})
            unmark_passing(path)

    def _save_weights(self, path: Path, at: StageStep) -> None:
        in_warm_start = at.stage == "warm_start"
        save_weights(
            path,
            self._policy,
            steps=0 if in_warm_start else at.step,
            warm_start_steps=at.step if in_warm_start else self._num_warm_start_steps,
        )

    def save_if_best(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Save the current weights, those after `step` steps, if they are the best so far.

        They are saved without the state for a resume, and kept as long as no others are better.
        Untrained weights are not saved.

        metrics: those of these weights; None: the value comes from their evaluation
        """
        best = self._config.best
        if best is None or (metrics is None) != self._config.best_by_evaluations:
            return
        top = self._best
        if metrics is not None:
            value = metrics.get(best.metric)
        else:
            values = self._values(self._reports())
            value = values.get(step)
            # One of other tasks does not compare, so the first evaluation of these is the best.
            top = top if top is not None and top[0] in values else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            return
        if top is not None and self._sign * value <= self._sign * top[1]:
            return
        at = StageStep("grpo", step)
        path = checkpoint_path(self._folder, at)
        if not path.exists() and step == 0:
            return
        if not path.exists() or is_passing(path):
            write_best_only(self._folder, read_best_only(self._folder) | {at.name})
        if not path.exists():
            with new_checkpoint(self._folder, at) as partial:
                self._save_weights(partial, at)
        self.tidy({step: float(value)})

    def load_weights(self, checkpoint: Path) -> None:
        load_weights(checkpoint, self._policy)

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint's weights, and its state of the group source and of the replay."""
        self.load_weights(checkpoint)
        self._source.load(checkpoint / RESUME)
        self._replay.load(checkpoint / RESUME)

    def load_progress(
        self, checkpoint: Path, optimizer: Optimizer | None, warm_start: WarmStart | None = None
    ) -> None:
        """Load a checkpoint's optimizer and reference, and the state of the warm start."""
        load_progress(checkpoint / RESUME, self._policy, optimizer)
        if warm_start is not None:
            warm_start.restore(read_json(checkpoint / RESUME / WARM_START))

    def tidy(self, now: Mapping[int, float] | None = None) -> None:
        """Link `best` to the best checkpoint, and delete checkpoints that need not be kept.

        now: by step, a value that is in no file yet
        """
        reports = self._reports()
        values = self._values(reports) | dict(now or {})
        paths = self._candidates()
        measured = {path: values.get(StageStep.of(path).step) for path in paths}
        if self._config.best is None:
            measured = dict.fromkeys(paths, 0.0)
        self._say_missing()
        self._say_left_out(reports)
        best = self._find_best(measured)
        if best is not None:
            step = StageStep.of(best).step
            self._best = step, values[step]
            point_best(self._folder, best)
        retain(
            self._folder,
            keep_last=self._config.keep_last,
            num_resumable=self._config.num_resumable,
            best={each for each in (best, self._best_at_resume(measured, reports)) if each},
            measured=measured,
        )

    def _candidates(self) -> list[Path]:
        best_only = read_best_only(self._folder)
        paths = all_checkpoints(self._folder)
        return [path for path in paths if not is_passing(path) or path.name in best_only]

    def _reports(self) -> list[EvalReport]:
        """Read the evaluations between steps, if they decide the best."""
        return read_during(self._folder) if self._config.best_by_evaluations else []

    def _values(self, reports: Sequence[EvalReport]) -> dict[int, float]:
        """Return the metric that decides the best, by the step that produced the weights.

        Of `reports`, only those that compare with the newest one count.
        """
        if self._config.best is None:
            return {}
        metric = self._config.best.metric
        if not self._config.best_by_evaluations:
            return measured_by_step(self._records(), metric)
        values: dict[int, float] = {}
        for report in like_newest(reports):
            interval = report.success if metric == "eval/success" else report.reward
            if report.is_representative and interval is not None and report.step is not None:
                values[report.step] = interval.mean
        return values

    def _records(self) -> list[dict[str, Any]]:
        records = read_metrics(self._metrics_path, budget=None)
        return [record for record in records if record["stage"] == "grpo"]

    def _say_missing(self) -> None:
        """Warn once if the metric that decides which checkpoint is best does not exist."""
        best = self._config.best
        if self._said_missing or best is None or self._config.best_by_evaluations:
            return
        records = self._records()
        if records and best.metric not in records[-1]:
            self._said_missing = True
            self._say(
                f"trainer.checkpoint.best.metric={best.metric!r} is not among the metrics of step "
                f"{records[-1]['step']}; weights that it does not measure cannot be the best, and "
                f"their checkpoints are not deleted{did_you_mean(best.metric, sorted(records[-1]))}"
            )

    def _say_left_out(self, reports: Sequence[EvalReport]) -> None:
        """Say once if evaluations do not count because `eval.during` was another one then."""
        num_left_out = len(reports) - len(like_newest(reports))
        if num_left_out and not self._said_left_out:
            self._said_left_out = True
            newest, plural = reports[-1], "s" * (num_left_out != 1)
            self._say(
                f"{num_left_out} earlier evaluation{plural} between steps had other tasks or "
                f"samples_per_task than {newest.label} ({newest.played}); the best checkpoint is "
                "chosen among those that were evaluated like it"
            )

    @property
    def _sign(self) -> float:
        return 1.0 if self._config.best and self._config.best.direction == "max" else -1.0

    def _find_best(self, measured: Mapping[Path, float | None]) -> Path | None:
        """Return the best checkpoint, the first of equal ones; None if there is none."""
        known = {path: value for path, value in measured.items() if value is not None}
        if self._config.best is None or not known:
            return None
        return max(known, key=lambda path: self._sign * known[path])

    def _best_at_resume(
        self, measured: Mapping[Path, float | None], reports: Sequence[EvalReport]
    ) -> Path | None:
        """Return what is the best if the run is killed and resumes from its newest checkpoint."""
        resumable = [path for path in all_checkpoints(self._folder) if is_resumable(path)]
        if not resumable or self._config.best is None:
            return None
        last = StageStep.of(resumable[-1]).step
        if not self._config.best_by_evaluations:
            last -= 1  # Its metrics come with the step after it.
        else:
            # The resume sets later evaluations aside, so the newest one may have other tasks.
            values = self._values([each for each in reports if (each.step or 0) <= last])
            measured = {path: values.get(StageStep.of(path).step) for path in measured}
        return self._find_best(
            {path: value for path, value in measured.items() if StageStep.of(path).step <= last}
        )


def like_newest(reports: Sequence[EvalReport]) -> list[EvalReport]:
    """Return the reports, given by step, with the tasks and samples per task of the last one."""

    def played(report: EvalReport) -> tuple[int, list[tuple[str, int, str]]]:
        return report.samples_per_task, sorted(task.key for task in report.tasks)

    newest = played(reports[-1]) if reports else None
    return [report for report in reports if played(report) == newest]


def measured_by_step(records: Sequence[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """Return a metric of GRPO steps, by the step that produced the weights that it measures.

    A step's episodes are sampled with the weights before its update, or with older ones under
    `max_staleness`. For weights that sampled the episodes of several steps, the mean counts.
    """
    values = defaultdict(list)
    trained = records[0]["step"] - 1 if records else 0  # the last step that changed the weights
    for record in records:
        age = round(record.get("staleness/mean") or 0.0)
        made_by = trained - age if age else record["step"] - 1
        if record.get(metric) is not None:
            values[made_by].append(record[metric])
        if "lr" in record:
            trained = record["step"]
    return {step: fmean(each) for step, each in values.items()}
