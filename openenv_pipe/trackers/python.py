"""The tracker of `type: python`: a class or a function of the user, or of a plugin."""

from pathlib import Path

from openenv_pipe.config.schema import PythonTrackerConfig
from openenv_pipe.system.python_targets import build_part, check_part
from openenv_pipe.trackers.base import Tracker


def check_python_tracker(key: str, config: PythonTrackerConfig) -> None:
    """Import the target without calling it. Raises ConfigError if it makes no tracker."""
    check_part(key, config, Tracker, 1)


def build_python_tracker(key: str, config: PythonTrackerConfig, folder: Path) -> Tracker:
    """Call the target with the run folder. Raises ConfigError if it makes no tracker."""
    return build_part(key, config, Tracker, folder)
