"""Rewind a run folder to a checkpoint, so that every step is recorded once.

Complete files of later steps are not deleted but moved to `logs/attempt_<n>/set_aside/` of the
attempt that resumes. A rewind that was killed can be repeated.
"""

import os
import shutil
from pathlib import Path

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.allocation import SUBFOLDERS
from openenv_pipe.runs.checkpoints import StageStep, all_checkpoints
from openenv_pipe.runs.evals import DURING, STAGES, read_report
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.images import FOLDER as IMAGES
from openenv_pipe.runs.metrics import parse_record, read_lines
from openenv_pipe.system.budgets import METRICS_LINE
from openenv_pipe.system.files import open_file, write_bytes


def rewind(folder: RunFolder, place: StageStep | None) -> list[str]:
    """Set aside what the run did after `place`; None: after its start.

    Demonstrations stay. Returns what was set aside because it is damaged, as sentences.
    """
    order = place.order if place else (False, 0)
    grpo_step = place.step if place and place.stage == "grpo" else 0
    aside = folder.logs / "set_aside"
    _remove_halves(folder.path)
    for path in all_checkpoints(folder.path):
        if StageStep.of(path).order > order:
            _move(path, aside / "checkpoints")
    for path in sorted((folder.path / "episodes").glob("*.jsonl.gz")):
        step = path.name.removeprefix("step_").removeprefix("tokens_").removesuffix(".jsonl.gz")
        if step.isdecimal() and int(step) > grpo_step:
            _move(path, aside / "episodes")
    damage = _set_evaluations_aside(folder.path / "eval", place, aside / "eval")
    damage += _cut_metrics(folder.metrics_path, order, aside)
    if (folder.path / "tensorboard").exists():  # The resumed run writes all of it again.
        _move(folder.path / "tensorboard", aside)
    return damage


def _remove_halves(folder: Path) -> None:
    """Delete unfinished files of killed attempts; their names begin with a dot."""
    folders = (folder / name for name in (*SUBFOLDERS, IMAGES))
    places = [folder, *folders, *all_checkpoints(folder)]
    for place in places:
        if place.is_symlink():  # Its files may be somebody else's.
            continue
        for half in place.glob(".*"):
            if half.is_dir() and not half.is_symlink():
                shutil.rmtree(half)
            else:
                half.unlink()


def _set_evaluations_aside(folder: Path, place: StageStep | None, aside: Path) -> list[str]:
    """Set aside evaluations of later weights that training played; those that `eval` played stay.

    Damaged ones of training are set aside too, and described in the result.

    A run that stopped in its warm start has evaluated its weights as `trained`, at step 0 of GRPO.
    """
    grpo_step = place.step if place and place.stage == "grpo" else None
    damage = []
    for path in sorted(folder.glob("*.json")):
        if not path.name.startswith((*STAGES, DURING)):
            continue
        try:
            report = read_report(path)
        except RunFolderError as error:
            damage.append(f"{error}: set aside in {aside}")
        else:
            trained_before_grpo = grpo_step is None and report.label.startswith("trained")
            is_later = trained_before_grpo or (report.step or 0) > (grpo_step or 0)
            if report.step is None or not is_later:
                continue
        for file in (path, path.with_suffix(".md"), path.with_suffix(".jsonl.gz")):
            if file.exists() or file.is_symlink():
                _move(file, aside)
    return damage


def _cut_metrics(path: Path, order: tuple[bool, int], aside: Path) -> list[str]:
    """Set aside lines that are later, cut off by a kill or damaged; describe damaged ones."""
    if not path.exists():
        return []
    damage = []
    kept: list[bytes] = []
    cut = [_unfinished_line(path)]
    for number, line in read_lines(path):
        try:
            record = parse_record(path, number, line)
            is_kept = (record["stage"] == "grpo", record["step"]) <= order
        except RunFolderError as error:
            damage.append(f"{error}: set aside in {aside}")
            is_kept = False
        (kept if is_kept else cut).append(line + b"\n")
    if any(cut):
        aside.mkdir(parents=True, exist_ok=True)
        write_bytes(aside / path.name, b"".join([*cut[1:], cut[0]]))
        write_bytes(path, b"".join(kept))
    return damage


def _unfinished_line(path: Path) -> bytes:
    """Return what a kill has left of a file's last line."""
    max_bytes = METRICS_LINE.max_mb * 2**20
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
        return file.read(max_bytes).rpartition(b"\n")[2]


def _move(path: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    path.rename(to / path.name)
