"""Metrics, configuration and episodes as a run of Trackio, in a local folder."""

import sys
import uuid
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from openenv_pipe.extras.trackers.episode_table import COLUMNS, episode_rows
from openenv_pipe.extras.trackers.schema import TrackioTrackerConfig
from openenv_pipe.runs.record import EndStatus
from openenv_pipe.system.optional_packages import needed_by
from openenv_pipe.system.untrusted_text import code_block
from openenv_pipe.trackers.base import Opened, TrackedEvaluation, TrackedRun, TrackedStep, origin_of


class TrackioTracker:
    def __init__(self, key: str, config: TrackioTrackerConfig, folder: Path) -> None:
        with needed_by("tracker=trackio", "trackio", ", or set tracker=none"):
            import trackio
            import trackio.sqlite_storage
        self._trackio: Any = trackio
        self._config = config
        self._run: Any = None
        self._next_index = 0

    def open(self, run: TrackedRun) -> Opened:
        run_id = run.saved_id or uuid.uuid4().hex
        storage = self._trackio.sqlite_storage.SQLiteStorage
        last = storage.get_max_step_for_run(self._config.project, run.id, run_id=run_id)
        # Not trackio.init(), which prints to stdout, records the machine and knows no ids.
        self._run = self._trackio.Run(
            url=None,
            project=self._config.project,
            client=None,
            name=run.id,
            run_id=run_id,
            group=run.sweep,
            config={**run.config, "openenv_pipe": origin_of(run, "trackio_id")},
            initial_last_step=last,
        )
        self._next_index = 0 if last is None else last + 1
        return Opened(run_id=run_id, num_records=self._next_index)

    def log(self, step: TrackedStep) -> None:
        """Send a record, and its table of episodes, whose texts Trackio shows as Markdown."""
        stage, number = step.record["stage"], step.record["step"]
        values: dict[str, Any] = {**step.numbers, f"{stage}/step": number}
        if rows := episode_rows(self._config, step):
            data = [[*row[:-1], code_block(row[-1])] for row in rows]
            values["episodes"] = self._trackio.Table(columns=list(COLUMNS), data=data)
        self._run.log(values, step=step.index)
        self._next_index = step.index + 1

    def log_evaluation(self, evaluation: TrackedEvaluation) -> None:
        values = {**evaluation.numbers, "eval/step": evaluation.step}
        self._run.log(values, step=evaluation.index - 1)

    def close(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        last = {f"summary/{name}": value for name, value in summary.items()}
        last |= {f"status/{status}": 1}
        self._run.log(last, step=self._next_index - 1)
        with redirect_stdout(sys.stderr):  # it prints, and stdout is for results
            self._run.finish()
