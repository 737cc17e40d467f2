"""The checkpoints of a run folder: names, digests, and which are kept.

    checkpoints/
      step_000040/       weights or adapter, tokenizer, counters.json, digests.json
        resume/          optimizer, reference, order of tasks; its own digests.json
      warm_start_000060/ the same during the warm start; deleted when the warm start is over
      best -> step_000040
      best_only.json     names of those that are kept only as long as they are the best

A checkpoint is written beside its place and then renamed, and is renamed before it is deleted, so
that one with its proper name is complete. None is overwritten, except that a complete one replaces
one of the same step without `resume/`. A damaged one is never used.
"""

import logging
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.record import RunRecord
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
# Suffixes of what libraries load. The last ones are of pickles, which no run writes.
LOADABLE = (".safetensors", ".json", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
RESUME = "resume"
BEST_ONLY = "best_only.json"
PASSING = "passing.json"  # marks a checkpoint that only serves to resume
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageStep:
    """The progress of a run: `step` steps of a stage are done."""

    stage: Stage
    step: int

    @property
    def name(self) -> str:
        return f"{PREFIXES[self.stage]}_{self.step:06d}"

    @property
    def order(self) -> tuple[bool, int]:
        """A key that sorts by time."""
        return self.stage == "grpo", self.step

    @classmethod
    def of(cls, path: Path) -> "StageStep":
        """Return the progress that a checkpoint folder is named after."""
        found = NAME.fullmatch(path.name)
        assert found, path
        return cls(STAGES[found[1]], int(found[2]))


WARM_START_END = StageStep("grpo", 0)  # where GRPO begins after a warm start


def fork_origin(record: RunRecord) -> StageStep | None:
    """Return the step that a fork started from; None for other runs and for forks of RUN@start."""
    lineage = record.lineage
    if lineage is None or lineage.kind != "fork" or lineage.checkpoint is None:
        return None
    return StageStep.of(Path(lineage.checkpoint))


def can_begin_anew(record: RunRecord) -> bool:
    """Return whether the run's weights follow from its configuration alone."""
    is_recording = record.lineage is not None and record.lineage.kind == "recording"
    return fork_origin(record) is None and not is_recording


def can_resume(run: Path, record: RunRecord, status: str) -> bool:
    """Return whether `train --resume` may go on with a run that is not running.

    A finished run has nothing left to do, and one of evaluations nothing to train. A run that
    failed before its first checkpoint fails again, and a fork without checkpoints cannot restart.
    """
    needs_checkpoint = status == "failed" or not can_begin_anew(record)
    if status == "finished" or record.purpose == "evaluation":
        return False
    return not needs_checkpoint or bool(all_checkpoints(run))


def all_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run folder, the oldest first."""
    found = (path for path in (folder / "checkpoints").glob("*_*") if NAME.fullmatch(path.name))
    whole = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(whole, key=lambda path: StageStep.of(path).order)


def checkpoint_path(folder: Path, at: StageStep) -> Path:
    return folder / "checkpoints" / at.name


@contextmanager
def new_checkpoint(folder: Path, at: StageStep) -> Iterator[Path]:
    """Yield a folder to fill, which becomes the checkpoint unless the block raises.

    Raises RunFolderError: The checkpoint exists already, with its part for a resume.
    """
    path = checkpoint_path(folder, at)
    if is_resumable(path):
        raise RunFolderError(f"{path} exists already and is not overwritten")
    partial = path.parent / f".{path.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed attempt
    partial.mkdir(parents=True)
    try:
        yield partial
        write_digests(partial)
        sync_tree(partial)
        gone = path.parent / f".{path.name}.gone"
        shutil.rmtree(gone, ignore_errors=True)
        if path.exists():  # one of the best, without its part for a resume
            path.rename(gone)
        partial.rename(path)
        shutil.rmtree(gone, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(path.parent)
    _log.info("saved the checkpoint %s", path)


def write_digests(path: Path) -> None:
    """Write the digests of a checkpoint's files; the files for a resume have their own."""
    for part in (path, path / RESUME):
        if part.is_dir():
            files = [file for file in sorted(part.iterdir()) if file.is_file()]
            digests = {file.name: digest_of_file(file) for file in files if file.name != DIGESTS}
            write_json(part / DIGESTS, digests)


def is_resumable(path: Path) -> bool:
    return (path / RESUME).is_dir()


def find_damage(path: Path) -> str | None:
    """Describe what is wrong with a checkpoint's files; None if they are as written."""
    for part in [path, path / RESUME] if is_resumable(path) else [path]:
        try:
            damage = _find_damage(part, read_digests(part))
        except (RunFolderError, OSError) as error:
            return str(error)
        if damage is not None:
            return f"{RESUME}/{damage}" if part != path else damage
    return None


def read_digests(part: Path) -> dict[str, str]:
    """Read the sha256 of each file of a checkpoint, or of its part for a resume.

    Raises RunFolderError: digests.json is missing, damaged, or names no file of a checkpoint.
    """
    digests = read_json(part / DIGESTS)
    if not isinstance(digests, dict) or not all(isinstance(each, str) for each in digests.values()):
        raise RunFolderError(f"{part / DIGESTS} holds {digests!r:.80}; expected a sha256 per file")
    if any(not name or Path(name).name != name for name in digests):
        raise RunFolderError(f"{part / DIGESTS} names files of other folders")
    if not digests and part.name != RESUME:
        raise RunFolderError(f"{part / DIGESTS} names no file")
    return digests


def _find_damage(part: Path, digests: Mapping[str, str]) -> str | None:
    for name, digest in digests.items():
        if not (part / name).is_file():
            return f"{name} is missing"
        if digest_of_file(part / name) != digest:
            return f"{name} is not what was written (its sha256 differs)"
    loadable = (each.name for each in sorted(part.iterdir()) if each.suffix in LOADABLE)
    added = next((name for name in loadable if name not in digests and name != DIGESTS), None)
    return None if added is None else f"{added} is not among the files that were written"


def newest_sound(folder: Path, *, resumable: bool = False) -> Path | None:
    """Return the newest undamaged checkpoint; None if there is none.

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


def fork_command(folder: Path) -> str | None:
    """Return the command that makes a new run from the newest checkpoint; None if none can be used.

    A checkpoint of the warm start can only be resumed.
    """
    places = [StageStep.of(path) for path in all_checkpoints(folder)]
    steps = [place.step for place in places if place.stage == "grpo"]
    return f"openenv-pipe train --fork {folder}@{steps[-1]} KEY=VALUE" if steps else None


def find_checkpoint(folder: Path, which: str, *, others: Sequence[str] = ()) -> Path:
    """Return the checkpoint of a step, a name or `best`; if `which` is empty, the newest sound one.

    others: further names that the caller knows, for the error.
    Raises RunFolderError: It does not exist or is damaged.
    """
    paths = {path.name: path for path in all_checkpoints(folder)}
    by_step = {str(StageStep.of(path).step): path for path in paths.values() if "step" in path.name}
    best = folder / "checkpoints" / "best"
    if not which:
        found = newest_sound(folder)
    else:
        name = best.readlink().name if best.is_symlink() and which == "best" else which
        found = paths.get(name) or by_step.get(which)
    if found is None:
        named = [name for name in paths if "step" not in name]
        known = [*named, *by_step, *(["best"] if best.is_dir() else [])]
        raise RunFolderError(
            f"{folder} has no checkpoint {which!r}; there are: {', '.join([*others, *known])}"
            if which and known
            else f"{folder} has no checkpoint: {_why_none(folder)}"
        )
    if which and (damage := find_damage(found)):
        raise RunFolderError(f"checkpoint {found} is damaged: {damage}; name another one")
    return found


def _why_none(folder: Path) -> str:
    record = read_json(folder / "run.json")
    if record.get("purpose") == "evaluation":
        return "it has evaluations only, and trained nothing"
    if record.get("status") == "running":
        return "wait for its first one, or let Ctrl-C write one"
    return f"it is {record.get('status')}, and saved none"


def retain(
    folder: Path,
    *,
    keep_last: int | None,
    num_resumable: int,
    best: Collection[Path],
    measured: Mapping[Path, float | None],
) -> None:
    """Delete checkpoints that are not to be kept, and the resume part of older ones.

    Kept are the newest `keep_last` (None: all), the best, and those without a value in `measured`.
    One that only serves to resume (`mark_passing`) is deleted once a later one can be resumed, and
    one of `best_only` once it is no longer among the best.
    """
    best_only = read_best_only(folder)
    regular = []
    resumable = [path for path in all_checkpoints(folder) if is_resumable(path)]
    for path in all_checkpoints(folder):
        if is_passing(path):
            if path == resumable[-1]:
                continue
            _remove(path / RESUME if path in best else path)
        elif path.name not in best_only:
            regular.append(path)
        elif path not in best:
            _remove(path)
    if keep_last is not None:
        for path in regular[:-keep_last]:
            if path not in best and measured.get(path) is not None:
                _remove(path)
    for path in [path for path in all_checkpoints(folder) if is_resumable(path)][:-num_resumable]:
        _remove(path / RESUME)
    write_best_only(folder, best_only & {path.name for path in all_checkpoints(folder)})


def read_best_only(folder: Path) -> set[str]:
    """Read the names of the checkpoints that are kept only as long as they are the best."""
    path = folder / "checkpoints" / BEST_ONLY
    return set(read_json(path)) if path.exists() else set()


def write_best_only(folder: Path, names: Collection[str]) -> None:
    path = folder / "checkpoints" / BEST_ONLY
    if names or path.exists():
        path.parent.mkdir(exist_ok=True)
        write_json(path, sorted(names))


def point_best(folder: Path, best: Path) -> None:
    point_symlink(folder / "checkpoints" / "best", best.name)


def mark_passing(path: Path) -> None:
    """Mark a checkpoint in writing as one that only serves to resume."""
    write_json(path / RESUME / PASSING, True)


def unmark_passing(path: Path) -> None:
    """Keep a checkpoint that was written only to resume from."""
    part = path / RESUME
    # The digests come first: a file that they do not name is no damage, but a missing one is.
    digests = {name: digest for name, digest in read_digests(part).items() if name != PASSING}
    write_json(part / DIGESTS, digests)
    (part / PASSING).unlink()
    sync(part)


def is_passing(path: Path) -> bool:
    return (path / RESUME / PASSING).exists()


def _remove(path: Path) -> None:
    gone = path.parent / f".{path.name}.gone"
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)
