"""Rewind a run folder to a checkpoint, so that every step is recorded once.

Complete files of later steps are not deleted but moved to `logs/attempt_<n>/set_aside/` of the
attempt that resumes. A rewind that was killed can be repeated.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.allocation import SUBFOLDERS
from openenv_pipe.runs.checkpoints import StageStep, all_checkpoints
from openenv_pipe.runs.evals import DURING, STAGES, read_report
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.files import write_bytes


def rewind(folder: RunFolder, place: StageStep | None) -> None:
    """Set aside what the run did after `place`; None: all but the evaluation of its start."""
    order = place.order if place else (False, 0)
    grpo_step = place.step if place and place.stage == "grpo" else 0
    aside = folder.logs / "set_aside"
    _remove_halves(folder.path)
    for path in all_checkpoints(folder.path):
        if StageStep.of(path).order > order:
            _move(path, aside / "checkpoints")
    for path in sorted((folder.path / "episodes").glob("step_*.jsonl.gz")):
        if int(path.name.removeprefix("step_").partition(".")[0]) > grpo_step:
            _move(path, aside / "episodes")
    _set_evaluations_aside(folder.path / "eval", place, aside / "eval")
    _cut_metrics(folder.metrics_path, order, aside)
    if (folder.path / "tensorboard").exists():  # The resumed run writes all of it again.
        _move(folder.path / "tensorboard", aside)


def _remove_halves(folder: Path) -> None:
    """Delete unfinished files of killed attempts; their names begin with a dot."""
    places = [folder, *(folder / name for name in SUBFOLDERS), *all_checkpoints(folder)]
    for place in places:
        for half in place.glob(".*"):
            if half.is_dir() and not half.is_symlink():
                shutil.rmtree(half)
            else:
                half.unlink()


def _set_evaluations_aside(folder: Path, place: StageStep | None, aside: Path) -> None:
    """Set aside evaluations of later weights made by training; those made by `eval` stay.

    A run that stopped in its warm start has evaluated its weights as `trained`, at step 0 of GRPO.
    """
    grpo_step = place.step if place and place.stage == "grpo" else None
    for path in sorted(folder.glob("*.json")):
        try:
            report = read_report(path)
        except RunFolderError:
            continue
        by_training = report.label.startswith((*STAGES, DURING))
        trained_before_grpo = grpo_step is None and report.label.startswith("trained")
        is_later = trained_before_grpo or (report.step or 0) > (grpo_step or 0)
        if by_training and report.step is not None and is_later:
            for file in (path, path.with_suffix(".md"), path.with_suffix(".jsonl.gz")):
                if file.exists():
                    _move(file, aside)


def _cut_metrics(path: Path, order: tuple[bool, int], aside: Path) -> None:
    if not path.exists():
        return
    kept: list[bytes] = []
    cut: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        (kept if _is_kept(line, order) else cut).append(line)
    if cut:
        aside.mkdir(parents=True, exist_ok=True)
        write_bytes(aside / path.name, b"".join(cut))
        write_bytes(path, b"".join(kept))


def _is_kept(line: bytes, order: tuple[bool, int]) -> bool:
    """False for later lines, and for one that a kill cut off."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and (record["stage"] == "grpo", record["step"]) <= order


def _move(path: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    path.rename(to / path.name)
