"""Save and load the checkpoints of a run, choose the best, and delete old ones."""

import time
from collections.abc import Callable
from pathlib import Path

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.learner.checkpoint import load_progress, load_weights, save_progress, save_weights
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.models.policy import Policy
from openenv_pipe.pipeline.group_sources import GroupSource
from openenv_pipe.runs.checkpoints import (
    RESUME,
    StageStep,
    all_checkpoints,
    checkpoint_path,
    is_passing,
    mark_passing,
    new_checkpoint,
    point_best,
    retain,
)
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
        say: Callable[[str], None],
    ) -> None:
        self._config = config.trainer.checkpoint
        self._num_warm_start_steps = config.trainer.warm_start.steps
        self._folder = folder.path
        self._metrics_path = folder.metrics_path
        self._policy = policy
        self._source = source
        self._say = say
        self._said_missing = False
        self._saved_at_s = time.monotonic()  # or the beginning, while nothing is saved

    def is_saved(self, at: StageStep) -> bool:
        return checkpoint_path(self._folder, at).exists()

    def is_overdue(self) -> bool:
        """Return whether the last checkpoint is longer ago than `every_minutes`."""
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
        only for resuming, and is deleted when there is a newer one.
        """
        in_warm_start = at.stage == "warm_start"
        with new_checkpoint(self._folder, at) as path:
            save_weights(
                path,
                self._policy,
                steps=0 if in_warm_start else at.step,
                warm_start_steps=at.step if in_warm_start else self._num_warm_start_steps,
            )
            (path / RESUME).mkdir()
            save_progress(path / RESUME, self._policy, optimizer)
            self._source.save(path / RESUME)
            if warm_start is not None:
                write_json(path / RESUME / WARM_START, warm_start.state())
            if passing:
                mark_passing(path)
        self._saved_at_s = time.monotonic()
        self.tidy()

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint's weights into the policy, and its state into the group source."""
        load_weights(checkpoint, self._policy)
        self._source.load(checkpoint / RESUME)

    def load_progress(
        self, checkpoint: Path, optimizer: Optimizer | None, warm_start: WarmStart | None = None
    ) -> None:
        """Load a checkpoint's optimizer and reference, and the state of the warm start."""
        load_progress(checkpoint / RESUME, self._policy, optimizer)
        if warm_start is not None:
            warm_start.restore(read_json(checkpoint / RESUME / WARM_START))

    def tidy(self) -> None:
        """Let `best` link to the best checkpoint, and delete those that need not be kept."""
        measured = self._measure()
        self._say_missing(measured)
        best = self._find_best(measured)
        if best is not None:
            point_best(self._folder, best)
        retain(
            self._folder,
            keep_last=self._config.keep_last,
            num_resumable=self._config.num_resumable,
            best=best,
            measured=measured,
        )

    def _measure(self) -> dict[Path, float | None]:
        """Return for each checkpoint the metric that decides the best; None if it is missing."""
        paths = [path for path in all_checkpoints(self._folder) if not is_passing(path)]
        if self._config.best is None:
            return dict.fromkeys(paths, 0.0)
        records = {
            record["step"]: record
            for record in read_metrics(self._metrics_path)
            if record["stage"] == "grpo"
        }
        for report in read_during(self._folder):
            if not report.is_representative:
                continue
            found = {"eval/success": report.success, "eval/reward": report.reward}
            means = {name: interval.mean for name, interval in found.items() if interval}
            records[report.step] = {**records.get(report.step, {}), **means}
        metric = self._config.best.metric
        steps = {path: StageStep.of(path).step for path in paths}
        return {path: records.get(step, {}).get(metric) for path, step in steps.items()}

    def _say_missing(self, measured: dict[Path, float | None]) -> None:
        """Warn once if the metric that decides which checkpoint is best does not exist."""
        path = next(reversed(measured), None)
        best = self._config.best
        if self._said_missing or path is None or best is None or best.metric.startswith("eval/"):
            return
        records = read_metrics(self._metrics_path)
        if records and StageStep.of(path).step and measured[path] is None:
            self._said_missing = True
            metric = best.metric
            known = sorted(records[-1])
            self._say(
                f"trainer.checkpoint.best.metric={metric!r} is not among the metrics of "
                f"{path.name}, so it cannot be the best and is not deleted"
                f"{did_you_mean(metric, known)}"
            )

    def _find_best(self, measured: dict[Path, float | None]) -> Path | None:
        """Return the best checkpoint, the first of equal ones; None if there is none."""
        known = {path: value for path, value in measured.items() if value is not None}
        if self._config.best is None or not known:
            return None
        sign = 1.0 if self._config.best.direction == "max" else -1.0
        return max(known, key=lambda path: sign * known[path])
