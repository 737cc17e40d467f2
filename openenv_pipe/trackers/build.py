"""Check, build and serve the trackers that a configuration names."""

import queue
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import RunConfig, TrackerConfig
from openenv_pipe.registry import block_types, load
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import Evaluation, during_by_name, read_reports
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.record import EndStatus
from openenv_pipe.trackers.base import (
    ParentRun,
    TrackedEvaluation,
    TrackedRun,
    TrackedStep,
    Tracker,
)
from openenv_pipe.trackers.delivery import END_LIMIT_S, Delivery, read_state
from openenv_pipe.types import Group


def check_tracker(name: str, config: TrackerConfig) -> None:
    """Check that the tracker can be built, before there is a run folder.

    name: its key in the configuration.
    Raises ConfigError if its package is not installed, or if a target cannot be used.
    """
    if check := block_types("tracker")[config.type].check:
        load(check)(f"tracker.{name}", config)
        return
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as folder:
        build_tracker(name, config, Path(folder))


def build_tracker(name: str, config: TrackerConfig, folder: Path) -> Tracker:
    """Build a tracker of the run in `folder`, which connects to nothing yet.

    The `build` of a tracker's type is called with the dotted key of its block, its configuration
    and the run folder. For a type without `check`, `build` is called to check it.

    name: its key in the configuration.
    Raises ConfigError if its package is not installed, or if a target cannot be used.
    """
    build = load(block_types("tracker")[config.type].build)
    tracker: Tracker = build(f"tracker.{name}", config, folder)
    return tracker


class Trackers:
    """All trackers of one attempt at a run. Call it in one thread."""

    def __init__(self, config: RunConfig, folder: RunFolder, notify: Callable[[str], None]) -> None:
        """notify: called with sentences for people, in the caller's thread.

        Raises ConfigError: a tracker cannot be built.
        """
        self._notify = notify
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()  # by the trackers' threads
        self._num_records = 0
        earlier = [*read_reports(folder.path).values(), *during_by_name(folder.path).values()]
        self._earlier = deque(sorted(earlier, key=_step_of))  # evaluations of earlier attempts
        built = {
            name: build_tracker(name, each, folder.path) for name, each in config.tracker.items()
        }
        self._deliveries = [
            Delivery(name, tracker, _tracked_run(name, folder), self._told.put)
            for name, tracker in built.items()
        ]

    def log(self, record: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        """Send the next record of metrics.jsonl. The records of earlier attempts come first."""
        if record["stage"] == "grpo":
            self._send_earlier(record["step"])
        step = TrackedStep(index=self._num_records, record=record, groups=groups)
        self._num_records += 1
        self._send(step)

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Send an evaluation that has just been played."""
        self._send_earlier(_step_of(evaluation.report) + 1)
        self._send_evaluation(evaluation.report, evaluation.groups)

    def close(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        """Wait until everything is sent, or for a minute at most."""
        self._send_earlier(None)
        for delivery in self._deliveries:
            delivery.end(status, summary)
        until = time.monotonic() + END_LIMIT_S
        for delivery in self._deliveries:
            delivery.join(max(until - time.monotonic(), 0.0))
        self._tell_all()

    def _send_earlier(self, before: int | None) -> None:
        """Send evaluations of earlier attempts, of models before this step of GRPO; None: all."""
        while self._earlier and (before is None or _step_of(self._earlier[0]) < before):
            self._send_evaluation(self._earlier.popleft())

    def _send_evaluation(self, report: EvalReport, groups: Sequence[Group] = ()) -> None:
        self._send(TrackedEvaluation(index=self._num_records, report=report, groups=groups))

    def _send(self, item: TrackedStep | TrackedEvaluation) -> None:
        for delivery in self._deliveries:
            delivery.log(item)
        self._tell_all()

    def _tell_all(self) -> None:
        while not self._told.empty():
            self._notify(self._told.get())


def _step_of(report: EvalReport) -> int:
    """Return the step of GRPO whose model was evaluated; -1 for scripted policies."""
    return -1 if report.step is None else report.step


def _tracked_run(name: str, folder: RunFolder) -> TrackedRun:
    parent = None
    if (lineage := folder.record.lineage) is not None:
        known = read_state(Path(lineage.path), name)
        parent = ParentRun(
            kind=lineage.kind,
            id=lineage.run,
            path=lineage.path,
            checkpoint=lineage.checkpoint,
            tracker_run_id=known.run_id if known else None,
        )
    return TrackedRun(
        folder=folder.path.resolve(),
        id=folder.record.id,
        config=folder.written_config.model_dump(mode="json"),
        sweep=folder.record.sweep,
        parent=parent,
    )
