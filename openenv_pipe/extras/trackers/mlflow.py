"""Metrics, configuration and episodes as a run of MLflow, by its own client."""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openenv_pipe.config.diff import flat
from openenv_pipe.extras.trackers.episode_table import COLUMNS, episode_rows
from openenv_pipe.extras.trackers.schema import MlflowTrackerConfig
from openenv_pipe.runs.record import EndStatus
from openenv_pipe.system.optional_packages import needed_by
from openenv_pipe.trackers.base import Opened, TrackedEvaluation, TrackedRun, TrackedStep

SQLITE = "sqlite:///"
STATUSES = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MAX_PARAMS = 100  # in one call
MAX_PARAM_LENGTH = 500  # characters, which every version takes


class MlflowTracker:
    """One run of an experiment. Its parameters are the keys of the configuration."""

    def __init__(self, key: str, config: MlflowTrackerConfig, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        with needed_by("tracker=mlflow", "mlflow-skinny", ", or set tracker=none"):
            import alembic  # noqa: F401 (with sqlalchemy, what mlflow-skinny needs for SQLite)
            import mlflow
            import mlflow.entities
            import sqlalchemy  # noqa: F401
        logging.getLogger("mlflow").setLevel(
            logging.WARNING
        )  # each new file has lines about itself
        self._mlflow: Any = mlflow
        self._config = config
        self._client: Any = None
        self._run_id = ""

    def open(self, run: TrackedRun) -> Opened:
        if self._config.uri.startswith(SQLITE):
            Path(self._config.uri.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
        self._client = self._mlflow.MlflowClient(self._config.uri)
        if run.saved_id and self._continue(run.saved_id):
            self._run_id = run.saved_id
        else:
            self._run_id = self._begin(run)
        return Opened(run_id=self._run_id)

    def log(self, step: TrackedStep) -> None:
        """Send a record in one call, and its table of episodes as a file."""
        number = step.record["step"]
        if rows := episode_rows(self._config, step):
            table = json.dumps({"columns": COLUMNS, "data": rows})
            self._client.log_text(self._run_id, table, f"episodes/step_{number:06d}.json")
        self._log_metrics(step.numbers, number)

    def log_evaluation(self, evaluation: TrackedEvaluation) -> None:
        """Send the results as metrics at the step of GRPO that the model has reached."""
        self._log_metrics(evaluation.numbers, evaluation.step)

    def close(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        known = self._client.get_run(self._run_id).data.metrics
        left = {name: value for name, value in summary.items() if name not in known}
        self._log_metrics(left, 0)
        self._client.set_terminated(self._run_id, STATUSES[status])

    def _log_metrics(self, values: Mapping[str, float], step: int) -> None:
        metric, now_ms = self._mlflow.entities.Metric, int(time.time() * 1000)
        metrics = [metric(key, value, now_ms, step) for key, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _continue(self, run_id: str) -> bool:
        """Open a run again; False if the store no longer has it."""
        try:
            run = self._client.get_run(run_id)
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        if run.info.lifecycle_stage != "active":
            return False
        self._client.update_run(run_id, status="RUNNING")
        return True

    def _begin(self, run: TrackedRun) -> str:
        created = self._client.create_run(
            self._experiment_id(), run_name=run.id, tags=dict(_tags(run))
        )
        run_id: str = created.info.run_id
        params = [
            self._mlflow.entities.Param(key, str(value)[:MAX_PARAM_LENGTH])
            for key, value in flat(dict(run.config)).items()
        ]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
        self._client.log_text(run_id, json.dumps(run.config, indent=2), "config.json")
        return run_id

    def _experiment_id(self) -> str:
        """Return the experiment's id; a new one in a file keeps its artifacts beside the file."""
        name = self._config.experiment
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return found.experiment_id
        place = None
        if self._config.uri.startswith(SQLITE):
            database = Path(self._config.uri.removeprefix(SQLITE)).resolve()
            place = (database.parent / "mlflow_artifacts").as_uri()
        try:
            return self._client.create_experiment(name, artifact_location=place)
        except self._mlflow.exceptions.MlflowException:  # another run may have made it meanwhile
            if (found := self._client.get_experiment_by_name(name)) is None:
                raise
            return found.experiment_id


def _tags(run: TrackedRun) -> Iterator[tuple[str, str]]:
    yield "openenv_pipe.run", run.id
    yield "openenv_pipe.folder", str(run.folder)
    if run.sweep is not None:
        yield "openenv_pipe.sweep", run.sweep
    if run.parent is not None:
        yield f"openenv_pipe.{run.parent.kind}_of", run.parent.id
        yield "openenv_pipe.parent_folder", run.parent.path
        if run.parent.checkpoint:
            yield "openenv_pipe.parent_checkpoint", run.parent.checkpoint
        if run.parent.tracker_run_id:
            yield "mlflow.parentRunId", run.parent.tracker_run_id  # the page nests the run there
