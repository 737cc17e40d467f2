"""Trackers: send metrics to other tools, in addition to the run folder's metrics.jsonl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from openenv_pipe.config.schema import (
    NoTrackerConfig,
    PythonTrackerConfig,
    TensorboardTrackerConfig,
    TrackerConfig,
)
from openenv_pipe.system.python_targets import build_part, check_part


class Tracker(Protocol):
    """Receives each record of a run once, in order.

    A resumed run has a new tracker, which receives the records of the earlier attempts first.
    """

    def log(self, record: Mapping[str, Any]) -> None:
        """Take a record of metrics.jsonl: `step`, `stage` and numbers by name."""

    def close(self) -> None:
        """Write out what is buffered. The run has ended, or stops here."""


class NoTracker:
    """Sends metrics nowhere."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def check_tracker(config: TrackerConfig) -> None:
    """Check that the tracker's package or target can be used, and build nothing.

    Raises:
        ConfigError: it cannot be imported, or the target is of another kind.
    """
    match config:
        case TensorboardTrackerConfig():
            from openenv_pipe.trackers.tensorboard import load_writer

            load_writer()
        case PythonTrackerConfig():
            check_part("tracker", config, Tracker, 1)


def build_tracker(config: TrackerConfig, folder: Path) -> Tracker:
    """Build the tracker of the run in `folder`.

    Raises ConfigError if its package is not installed, or if a target cannot be used.
    """
    match config:
        case NoTrackerConfig():
            return NoTracker()
        case TensorboardTrackerConfig():
            from openenv_pipe.trackers.tensorboard import TensorboardTracker

            return TensorboardTracker(folder / "tensorboard")
        case PythonTrackerConfig():
            return build_part("tracker", config, Tracker, folder)
