"""Compare two run folders byte for byte, and find the first difference by step and name.

The order is that in which a run writes: each step's metrics, its episodes, its checkpoint; then
the evaluations. `time/*` is ignored. Tolerances are in `bands`.
"""

import filecmp
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.checkpoints import (
    RESUME,
    StageStep,
    all_checkpoints,
    fork_origin,
    is_passing,
    read_digests,
)
from openenv_pipe.runs.episodes import episodes_path, read_rows
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import (
    BASELINE,
    during_by_name,
    is_of_run,
    place_of,
    read_report,
    read_reports,
    report_paths,
)
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.runs.packed_lines import read_packed
from openenv_pipe.system.files import read_json

RECORDED_DIGESTS = "checkpoints.json"  # in a recording, which has no checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    where: str  # "grpo step 3"
    what: str  # "loss/policy"
    expected: str
    seen: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what} was {self.expected}, is {self.seen}"


def first_mismatches(
    expected: Path, seen: Path, *, only_learner: bool = False, is_whole: bool = False
) -> list[Mismatch]:
    """Return all differences of the first place that has any; [] if there are none.

    only_learner: `seen` trained on the episodes of `expected`, and has neither evaluations nor an
    engine's metrics. is_whole: both ended by themselves, so both have the same evaluations.
    """
    found: list[Mismatch] = []
    for mismatch in _mismatches(expected, seen, only_learner=only_learner, is_whole=is_whole):
        if found and mismatch.where != found[0].where:
            break
        found.append(mismatch)
    return found


def check_begins_anew(run: RunFolder) -> None:
    """Raise RunFolderError if a run begins with the weights of another one, as a fork does."""
    if fork_origin(run.record) is not None:
        assert run.record.lineage is not None
        raise RunFolderError(
            f"{run.path} is a {run.record.lineage.title}: it begins with weights that its "
            "configuration does not produce, so it cannot be repeated; name a run from its "
            "beginning"
        )


def check_readable(folder: Path) -> None:
    """Read all that a run is compared with, before the run is repeated. Raises RunFolderError."""
    checkpoint_digests(folder)
    read_metrics(folder / "metrics.jsonl")
    for path in report_paths(folder):
        read_report(path)
    for path in (folder / "episodes").glob("step_*.jsonl.gz"):
        for _ in read_rows(path):
            pass


def common_steps(expected: Path, seen: Path) -> int:
    return min(len(records_of(folder, "grpo")) for folder in (expected, seen))


def _mismatches(
    expected: Path, seen: Path, *, only_learner: bool, is_whole: bool
) -> Iterator[Mismatch]:
    theirs, ours = checkpoint_digests(expected), checkpoint_digests(seen)
    for stage in ("warm_start", "grpo"):
        old, new = records_of(expected, stage), records_of(seen, stage)
        for step in sorted(new):
            where = f"{stage} step {step}"
            if step not in old:
                yield Mismatch(where=where, what="the step", expected="absent", seen="there")
                return
            yield from _metrics(where, old[step], new[step], only_learner=only_learner)
            if stage == "grpo":
                yield from _episodes(where, expected, seen, step, only_learner=only_learner)
                name = StageStep("grpo", step).name
                yield from _files(where, theirs.get(name), ours.get(name))
        if stage == "warm_start":
            yield from _episodes("warm start", expected, seen, 0, only_learner=only_learner)
            name = StageStep("grpo", 0).name
            yield from _files("warm start", theirs.get(name), ours.get(name))
    if not only_learner:
        yield from _evaluations(expected, seen, is_whole=is_whole)


def records_of(folder: Path, stage: str) -> dict[int, dict[str, Any]]:
    records = read_metrics(folder / "metrics.jsonl")
    return {record["step"]: record for record in records if record["stage"] == stage}


def _metrics(
    where: str, old: Mapping[str, Any], new: Mapping[str, Any], *, only_learner: bool
) -> Iterator[Mismatch]:
    names = {*old} & {*new} if only_learner else {*old} | {*new}
    for name in sorted(name for name in names if not name.startswith("time/")):
        if old.get(name) != new.get(name) or (name in old) != (name in new):
            values = [repr(each[name]) if name in each else "absent" for each in (old, new)]
            yield Mismatch(where=where, what=name, expected=values[0], seen=values[1])


def _episodes(
    where: str, expected: Path, seen: Path, step: int, *, only_learner: bool
) -> Iterator[Mismatch]:
    """Compare a step's episodes. Those that `expected` lacks, whose files are large and may have
    been deleted, cannot be compared."""
    old, new = episodes_path(expected, step), episodes_path(seen, step)
    if old.exists() and not new.exists() and not only_learner:
        yield Mismatch(where=where, what="the file of episodes", expected="there", seen="absent")
        return
    if not (old.exists() and new.exists()) or filecmp.cmp(old, new, shallow=False):
        return
    counts = [str(sum(1 for _ in read_packed(each))) for each in (old, new)]
    if counts[0] != counts[1]:
        yield Mismatch(where=where, what="number of episodes", expected=counts[0], seen=counts[1])
    for a, b in zip(read_rows(old), read_rows(new), strict=False):
        for name in a:
            if a[name] != b.get(name):
                what = f"{name} of episode {a['group']}, member {a['member']}"
                values = [str(each.get(name))[:60] for each in (a, b)]
                yield Mismatch(where=where, what=what, expected=values[0], seen=values[1])


def _files(
    where: str, old: dict[str, str] | None, new: dict[str, str] | None
) -> Iterator[Mismatch]:
    """Compare a checkpoint's files. Missing resume state counts as equal: runs delete it later."""
    old, new = old or {}, new or {}
    for name in sorted({*old} & {*new}):
        if old[name] != new[name]:
            what = f"the sha256 of the checkpoint's {name}"
            yield Mismatch(where=where, what=what, expected=old[name][:12], seen=new[name][:12])


def _evaluations(expected: Path, seen: Path, *, is_whole: bool) -> Iterator[Mismatch]:
    old, new = own_evaluations(expected), own_evaluations(seen)
    # Of a label's reports only the newest has to be there: a run that went on after its end has
    # one more. A baseline may be of `eval`, which plays those that the run itself did not.
    newest = {*dict(old.keys()).items(), *dict(new.keys()).items()}
    for label, step in dict.fromkeys([*old, *new]):
        where, a, b = f"evaluation {label}", old.get((label, step)), new.get((label, step))
        if a is not None and b is not None:
            yield from _reports(where, a.model_dump(), b.model_dump())
        elif is_whole and (label, step) in newest and not label.startswith(BASELINE):
            values = ["absent" if each is None else "there" for each in (a, b)]
            yield Mismatch(where=where, what="the report", expected=values[0], seen=values[1])


def _reports(where: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Mismatch]:
    for key in old:
        if old[key] != new[key]:
            values = [str(each[key])[:60] for each in (old, new)]
            yield Mismatch(where=where, what=key, expected=values[0], seen=values[1])


def own_evaluations(folder: Path) -> dict[tuple[str, int | None], EvalReport]:
    """Read the newest report of each label and step that the run itself has made."""
    reports = read_reports(folder) | during_by_name(folder)
    names = sorted(filter(is_of_run, reports), key=place_of)
    return {(reports[name].label, reports[name].step): reports[name] for name in names}


def checkpoint_digests(folder: Path) -> dict[str, dict[str, str]]:
    """Return the sha256 of every file of every checkpoint, by the checkpoint's name."""
    recorded = folder / RECORDED_DIGESTS
    if recorded.exists():
        digests = read_json(recorded)
        named = digests.values() if isinstance(digests, dict) else [None]
        if not all(isinstance(each, dict) for each in named):
            raise RunFolderError(
                f"{recorded} holds {digests!r:.80}; expected digests by checkpoint"
            )
        return digests
    paths = [path for path in all_checkpoints(folder) if not is_passing(path)]
    return {path.name: _digests_of(path) for path in paths}


def _digests_of(path: Path) -> dict[str, str]:
    try:
        digests = dict(read_digests(path))
        if (path / RESUME).is_dir():
            inner = read_digests(path / RESUME)
            digests |= {f"{RESUME}/{name}": digest for name, digest in inner.items()}
    except RunFolderError:
        return {}  # Damaged files are reported by `find_damage`.
    return digests
