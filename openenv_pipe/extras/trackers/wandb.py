"""Metrics, configuration and episodes as a run of Weights & Biases, by its own client."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openenv_pipe.extras.trackers.episode_table import COLUMNS, episode_rows
from openenv_pipe.extras.trackers.schema import WandbTrackerConfig
from openenv_pipe.runs.record import EndStatus
from openenv_pipe.system.optional_packages import needed_by
from openenv_pipe.trackers.base import Opened, TrackedEvaluation, TrackedRun, TrackedStep, origin_of

LIMIT_S = 30  # for the tool's answer at the beginning and at the end of a run


class WandbTracker:
    """One run, whose steps are the lines of metrics.jsonl; offline, files in the run folder."""

    def __init__(self, key: str, config: WandbTrackerConfig, folder: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of its own errors, to its makers
        with needed_by("tracker=wandb", "wandb", ", or set tracker=none"):
            import wandb
        self._wandb: Any = wandb
        self._config = config
        self._run: Any = None
        self._evaluated: dict[str, float] = {}  # since the last record

    def open(self, run: TrackedRun) -> Opened:
        if self._run is not None:
            self._run.finish(exit_code=1)
        run_id = run.saved_id or uuid.uuid4().hex
        self._run = self._wandb.init(
            dir=run.folder,
            project=self._config.project,
            entity=self._config.entity,
            id=run_id,
            name=run.id,
            resume="allow",
            reinit="create_new",
            group=run.sweep,
            tags=[*self._config.tags, *([run.parent.kind] if run.parent else [])],
            notes=_notes(run),
            config={**run.config, "openenv_pipe": origin_of(run, "wandb_id")},
            settings=self._settings(),
        )
        for stage in ("warm_start", "grpo", "eval"):
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        is_online = self._config.mode == "online"
        return Opened(run_id=run_id, num_records=self._run.step if is_online else None)

    def log(self, step: TrackedStep) -> None:
        stage, number = step.record["stage"], step.record["step"]
        values: dict[str, Any] = {**step.numbers, f"{stage}/step": number, **self._evaluated}
        if rows := episode_rows(self._config, step):
            table = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
            values["episodes"] = table
        self._run.log(values, step=step.index, commit=True)
        self._evaluated.clear()

    def log_evaluation(self, evaluation: TrackedEvaluation) -> bool:
        """Show the results in the summary at once, and in charts with the next record.

        A row of their own would take the number of the next record. A resumed run, which counts
        rows to learn how many records there are, would then leave that record out.
        """
        self._run.summary.update(evaluation.numbers)
        self._evaluated |= {**evaluation.numbers, "eval/step": evaluation.step}
        return True

    def close(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        self._run.summary.update({**summary, "status": status})
        self._run.finish(exit_code=0 if status == "finished" else 1)

    def _settings(self) -> Any:
        """Return settings that send nothing about the machine, the code or the output."""
        return self._wandb.Settings(
            mode=self._config.mode,
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            init_timeout=LIMIT_S,
            finish_timeout=LIMIT_S,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
        )


def _notes(run: TrackedRun) -> str | None:
    if run.parent is None:
        return None
    where = f"@{run.parent.checkpoint}" if run.parent.checkpoint else ""
    known = f" (run {run.parent.tracker_run_id})" if run.parent.tracker_run_id else ""
    return f"{run.parent.kind} of {run.parent.id}{where}{known}"
