"""The checkpoints of a run folder: names, digests, which of them stay.

    checkpoints/
      step_000040/       weights or adapter, tokenizer, counters.json, digests.json
        resume/          optimizer, reference, order of tasks; digests.json of its own
      warm_start_000060/ the same, during the warm start; goes when the warm start is over
      best -> step_000040

A checkpoint is written aside and renamed, and goes the same way: what has its name is whole.
Refuses to overwrite one, and to hand out one whose files are not those that were written.
"""

import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openenv_pipe.errors import RunFolderError
from openenv_pipe.system.files import (
    digest_of_file,
    point_symlink,
    read_json,
    sync,
    sync_tree,
    write_json,
)

Stage = Literal["warm_start", "grpo"]
NAME = re.compile(r"(step|warm_start)_(\d{6,})")
PREFIXES: dict[Stage, str] = {"warm_start": "warm_start", "grpo": "step"}
STAGES: dict[str, Stage] = {prefix: stage for stage, prefix in PREFIXES.items()}
DIGESTS = "digests.json"
RESUME = "resume"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """How far a run has come: `step` steps of a stage are done."""

    stage: Stage
    step: int

    @property
    def name(self) -> str:
        return f"{PREFIXES[self.stage]}_{self.step:06d}"

    @property
    def order(self) -> tuple[bool, int]:
        """Sorts places by time."""
        return self.stage == "grpo", self.step

    @classmethod
    def of(cls, path: Path) -> "Place":
        """That of a checkpoint, by its folder's name."""
        found = NAME.fullmatch(path.name)
        assert found, path
        return cls(STAGES[found[1]], int(found[2]))


def all_checkpoints(folder: Path) -> list[Path]:
    """Those of a run folder, the oldest first."""
    found = (path for path in (folder / "checkpoints").glob("*_*") if NAME.fullmatch(path.name))
    whole = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(whole, key=lambda path: Place.of(path).order)


def checkpoint_path(folder: Path, place: Place) -> Path:
    return folder / "checkpoints" / place.name


@contextmanager
def new_checkpoint(folder: Path, place: Place) -> Iterator[Path]:
    """A folder to fill; it becomes the checkpoint if the block ends without an exception.

    Raises RunFolderError if there is a checkpoint of this place: none is ever overwritten.
    """
    path = checkpoint_path(folder, place)
    if path.exists():
        raise RunFolderError(f"{path} exists and is not overwritten")
    partial = path.parent / f".{path.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed attempt
    partial.mkdir(parents=True)
    try:
        yield partial
        write_digests(partial)
        sync_tree(partial)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(path.parent)


def write_digests(path: Path) -> None:
    """Writes down what the files of a checkpoint are, those for a resume apart from the rest."""
    for part in (path, path / RESUME):
        if part.is_dir():
            files = [file for file in sorted(part.iterdir()) if file.is_file()]
            digests = {file.name: digest_of_file(file) for file in files if file.name != DIGESTS}
            write_json(part / DIGESTS, digests)


def is_resumable(path: Path) -> bool:
    return (path / RESUME).is_dir()


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, in words; None if they are those written."""
    parts = [path, path / RESUME] if is_resumable(path) else [path]
    for part in parts:
        try:
            digests = read_json(part / DIGESTS)
        except RunFolderError as error:
            return str(error)
        for name, digest in digests.items():
            file = part / name
            if not file.is_file():
                return f"{file.relative_to(path)} is missing"
            if digest_of_file(file) != digest:
                return f"{file.relative_to(path)} is not what was written (its sha256 differs)"
    return None


def newest_sound(folder: Path, *, resumable: bool = False) -> Path | None:
    """The last checkpoint whose files are as they were written; None if there is none.

    Logs a warning for each damaged one that it passes over.
    """
    for path in reversed(all_checkpoints(folder)):
        if resumable and not is_resumable(path):
            continue
        damage = find_damage(path)
        if damage is None:
            return path
        _log.warning("checkpoint %s is damaged and not used: %s", path.name, damage)
    return None


def find_checkpoint(folder: Path, which: str) -> Path:
    """The checkpoint that a person means: a step, `best`, or without a word the last sound one.

    Raises RunFolderError if it is not there or damaged.
    """
    paths = {path.name: path for path in all_checkpoints(folder)}
    by_step = {str(Place.of(path).step): path for path in paths.values() if "step" in path.name}
    best = folder / "checkpoints" / "best"
    if not which:
        found = newest_sound(folder)
    else:
        found = paths.get(best.resolve().name) if which == "best" else by_step.get(which)
    if found is None:
        known = ", ".join([*by_step, *(["best"] if best.is_dir() else [])])
        raise RunFolderError(
            f"{folder} has no checkpoint {which!r}; there are: {known}"
            if which and known
            else f"{folder} has no checkpoint yet; Ctrl-C writes one"
        )
    if which and (damage := find_damage(found)):
        raise RunFolderError(f"checkpoint {found} is damaged: {damage}; choose another one")
    return found


def retain(
    folder: Path,
    *,
    keep_last: int | None,
    num_resumable: int,
    best: Path | None,
    measured: Mapping[Path, float | None],
) -> None:
    """Removes the checkpoints that nobody asked to keep, and the old ones' part for a resume.

    The newest `keep_last` stay (None: all), the best, and those that `measured` has no number
    for. What was written between two regular ones, to go on from only (see `mark_passing`), goes
    as soon as there is a later one.
    """
    paths = all_checkpoints(folder)
    regular = [path for path in paths if not is_passing(path)]
    for path in paths:
        if path not in regular and path != paths[-1]:
            _remove(path)
    if keep_last is not None:
        for path in regular[:-keep_last]:
            if path != best and measured.get(path) is not None:
                _remove(path)
    for path in [path for path in all_checkpoints(folder) if is_resumable(path)][:-num_resumable]:
        _remove(path / RESUME)


def point_best(folder: Path, best: Path) -> None:
    point_symlink(folder / "checkpoints" / "best", best.name)


def mark_passing(path: Path) -> None:
    """Of a checkpoint that is being written: it is there to go on from, and for nothing else."""
    write_json(path / RESUME / "passing.json", True)


def is_passing(path: Path) -> bool:
    return (path / RESUME / "passing.json").exists()


def _remove(path: Path) -> None:
    gone = path.parent / f".{path.name}.gone"
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)
