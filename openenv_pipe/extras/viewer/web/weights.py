"""Which weights wrote an episode, and which of a run's are there to score it."""

from pathlib import Path
from typing import Any

from openenv_pipe.extras.viewer.episodes.query import TRAIN
from openenv_pipe.extras.viewer.web.run_page import checkpoint_steps
from openenv_pipe.runs.checkpoints import (
    WARM_START_END,
    StageStep,
    checkpoint_path,
    fork_origin,
)
from openenv_pipe.runs.evals import STAGES, read_during, read_reports
from openenv_pipe.runs.find import AT_START
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.types import Episode

UNTRAINED = "start"  # as RUN@start names the weights that a run began with


def first_step(folder: RunFolder) -> StageStep | None:
    """Return where a fork, or GRPO after a warm start, began; None: with the untrained weights."""
    after_warm_start = WARM_START_END if folder.written_config.trainer.warm_start.steps else None
    return fork_origin(folder.record) or after_warm_start


def start_of_training(folder: RunFolder) -> Path | None:
    """Return the checkpoint with which GRPO began, if it is there; None: the untrained weights."""
    first = first_step(folder)
    path = checkpoint_path(folder.path, first) if first else None
    return path if path is not None and path.is_dir() else None


def weights_of(folder: RunFolder, source: str, episode: Episode) -> dict[str, Any]:
    """Return the name of the weights that wrote an episode, and the names of those that are there.

    A name is what follows the @ in RUN@40; null: no weights of this run wrote it.
    """
    kept = [str(step) for step in checkpoint_steps(folder.path)]
    return {"wrote": _wrote(folder, source, episode), "kept": [*kept, UNTRAINED]}


def _wrote(folder: RunFolder, source: str, episode: Episode) -> str | None:
    if source == TRAIN:
        version = next((each for turn in episode.turns for each in turn.policy_versions), None)
        is_untrained = version == 0 and first_step(folder) is None
        return UNTRAINED if is_untrained else None if version is None else str(version)
    label = source.removeprefix("eval/")
    reports = {each.label: each for each in read_during(folder.path)} | read_reports(folder.path)
    report = reports.get(label)
    if report is None or report.temperature is None:
        return None
    if not report.step and label.startswith((AT_START, STAGES[0])):
        return UNTRAINED
    return None if report.step is None else str(report.step)
