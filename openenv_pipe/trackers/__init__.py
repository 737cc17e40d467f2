"""Trackers: where metrics go beside metrics.jsonl, which the run folder always has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from openenv_pipe.config.schema import TrackerConfig


class Tracker(Protocol):
    """Receives each record once, in order."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take a record of metrics.jsonl: `step`, `stage` and numbers."""

    def close(self) -> None:
        """Write out what is buffered."""


class NoTracker:
    """Sends metrics nowhere."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def build_tracker(config: TrackerConfig, folder: Path) -> Tracker:
    """The tracker of a run folder; raises ConfigError if its package is not installed."""
    match config.type:
        case "none":
            return NoTracker()
        case "tensorboard":
            from openenv_pipe.trackers.tensorboard import TensorboardTracker

            return TensorboardTracker(folder / "tensorboard")
