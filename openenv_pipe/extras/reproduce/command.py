"""Run a run again and say whether the two are the same.

Differences in code, versions, data or model that show before training are rejected unless allowed.
A different machine is only reported; the comparison shows whether the numbers are equal there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from openenv_pipe.config.diff import changed_keys
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.reproduce.bands import Band, eval_bands, mismatch_band, step_bands
from openenv_pipe.extras.reproduce.comparing import (
    check_begins_anew,
    check_readable,
    checkpoint_digests,
    common_steps,
    first_mismatches,
    own_evaluations,
    records_of,
)
from openenv_pipe.extras.reproduce.replaying import replay
from openenv_pipe.extras.reproduce.spans import Span, planned_spans
from openenv_pipe.models.teacher import find_teachers
from openenv_pipe.pipeline.callbacks import STOPPED
from openenv_pipe.pipeline.facts import facts_before
from openenv_pipe.pipeline.preparation import prepare
from openenv_pipe.pipeline.requirements import check_requirements
from openenv_pipe.pipeline.run import Attempt, RunControl, run
from openenv_pipe.pipeline.start import next_attempt
from openenv_pipe.runs.checkpoints import NAME, StageStep
from openenv_pipe.runs.differences import Difference, find_differences, find_other_facts
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.find import find_run
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.run import Run
from openenv_pipe.system.files import write_text
from openenv_pipe.system.markdown import table
from openenv_pipe.system.progress import Progress
from openenv_pipe.system.untrusted_text import for_markdown

REPLAYED = ("model", "trainer", "cluster", "tracker")  # blocks that a replay uses
ALLOWABLE = ("code", "versions", "data", "model")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    path: Path  # the folder of the new run; its reproduction.md has the details
    num_steps: int  # of GRPO, that both runs have
    is_same: bool  # byte for byte, or within the bands where bytes cannot be expected to be equal
    is_exact: bool  # whether bytes were compared
    first_difference: str | None  # None if the runs are the same


def reproduce(
    name: str,
    *,
    steps: int | None,
    allow: Collection[str],
    is_replay: bool,
    runs_dir: Path | None,
    command: Sequence[str],
    control: RunControl,
    trust: bool,
) -> Reproduction:
    """Repeat a run in a new folder, and compare the two. Raises RunFolderError and ConfigError."""
    _reject_unknown(allow)
    recorded = find_run(name, runs_dir)
    config = _config_to_repeat(recorded, runs_dir, is_replay=is_replay, trust=trust)
    check_requirements(config, plays=not is_replay)
    check_readable(recorded.path)
    num_recorded = common_steps(recorded.path, recorded.path)
    if config.trainer.steps and not num_recorded:
        raise RunFolderError(f"{recorded.path} has no step of GRPO to compare with")
    judge = partial(_reject_or_notify, allow, control.progress)
    judge(find_differences(recorded.record))
    _notify_of_changes(recorded, control.progress)
    if not is_replay:
        _reject(allow, find_other_facts(recorded.record.facts, facts_before(config)))
        control.stop.run(prepare(config, control.progress.note))
    if not num_recorded and (why := _why_inexact([recorded], config, is_replay=is_replay)):
        raise _no_bands(recorded.path, why)
    end = min(num_recorded, steps or num_recorded)
    spans = planned_spans(recorded)
    config = spans[0].of(config)
    folder = RunFolder.create(
        config,
        overrides=recorded.overrides,
        command=command,
        lineage=recorded.lineage("reproduction"),
    )
    attempt = Attempt(
        folder=folder,
        config=config,
        expected=recorded.record.facts,
        on_differences=judge,
        other_verdicts=[recorded.verdicts],
    )
    is_whole = steps is None and not is_replay and _is_complete(recorded, end)
    if is_whole:
        control = _stopping_like(recorded, control, end)
    control = replace(control, evaluates=bool(own_evaluations(recorded.path)))  # as it was made
    with folder.held():
        _repeat(
            *(recorded, attempt, spans, end, command, control),
            is_replay=is_replay,
            is_whole=is_whole,
        )
    return _compare(
        *(recorded, folder, config, control.progress, end),
        is_replay=is_replay,
        # Where a change of eval.during came between them, evaluations may be of steps done again.
        is_whole=is_whole and len(spans) == 1,
    )


def _notify_of_changes(recorded: RunFolder, progress: Progress) -> None:
    """Say where the attempts at a run differ, which are all repeated with one state."""
    for attempt in recorded.attempts[1:]:
        for text in attempt.differences:
            progress.note(
                f"attempt {attempt.number} of the recorded run differed from the first ({text}); "
                "its steps are repeated with what is here now"
            )


def _config_to_repeat(
    recorded: RunFolder, runs_dir: Path | None, *, is_replay: bool, trust: bool
) -> RunConfig:
    """Return the configuration of a run. Raises RunFolderError if the run cannot be repeated."""
    check_begins_anew(recorded)
    config = recorded.config_to_run(trust=trust, secrets_of=REPLAYED if is_replay else None)
    if not config.agent.plays_on_demand and not is_replay:
        raise RunFolderError(
            f"{recorded.path} was played by clients (agent=client), and nobody can play the same "
            "again; --replay (from Python: replay=True) trains on the recorded episodes"
        )
    return config.model_copy(update={"runs_dir": str(runs_dir)}) if runs_dir else config


def _repeat(
    recorded: RunFolder,
    attempt: Attempt,
    spans: Sequence[Span],
    end: int,
    command: Sequence[str],
    control: RunControl,
    *,
    is_replay: bool,
    is_whole: bool,
) -> None:
    """Do the steps up to `end`, and change the run where the recorded one was changed.

    is_whole: let the run end by itself, with its last evaluations.
    """
    execute = partial(replay, recorded=recorded.path) if is_replay else run
    for number, span in enumerate(spans):
        if number and span.start >= end:
            break
        if number:
            attempt = _extended(attempt, span, command, control, plays=not is_replay)
        is_last = number + 1 == len(spans)
        last = end if is_last else min(end, spans[number + 1].start)
        ends_by_itself = is_last and (is_whole or last == span.num_planned)
        attempt = replace(attempt, stop_after=None if ends_by_itself else last)
        execute(attempt, control=control)


def _is_complete(recorded: RunFolder, end: int) -> bool:
    """Return whether a run ended by itself after the step `end`, its last one that is there."""
    # A recording of the first steps also has the digests of later checkpoints.
    names = filter(NAME.fullmatch, checkpoint_digests(recorded.path))
    places = [StageStep.of(Path(name)) for name in names]
    is_cut = any(place.stage == "grpo" and place.step > end for place in places)
    return recorded.status == "finished" and not is_cut


def _stopping_like(recorded: RunFolder, control: RunControl, end: int) -> RunControl:
    """Return a control that ends a run where the recorded one stopped before its planned end.

    Where a callback had stopped it, one does so again. Otherwise the run has to stop itself; if it
    does not, it ends one step later, which shows the difference.
    """
    cause = recorded.record.cause
    if cause is None:
        return control
    last = end if cause.startswith(STOPPED) else end + 1

    def stop(run: Run, metrics: Mapping[str, Any]) -> str | None:
        is_last = metrics["stage"] == "grpo" and metrics["step"] == last
        return f"the recorded run ended after step {end}" if is_last else None

    return replace(control, callbacks=[*control.callbacks, stop])


def _extended(
    attempt: Attempt, span: Span, command: Sequence[str], control: RunControl, *, plays: bool
) -> Attempt:
    """Return an attempt that goes on with what a resume of the recorded run has changed."""
    config = span.of(attempt.config)
    changed = changed_keys(attempt.config, config)
    following = next_attempt(attempt.folder, config, changed, command, control, plays=plays)
    return replace(attempt, config=following.config, checkpoint=following.checkpoint)


def _compare(
    recorded: RunFolder,
    folder: RunFolder,
    config: RunConfig,
    progress: Progress,
    end: int,
    *,
    is_replay: bool,
    is_whole: bool,
) -> Reproduction:
    """Compare the runs, and write `reproduction.md`.

    end: the step that the new run had to reach. is_whole: it has to have all evaluations.

    Raises RunFolderError if bytes may differ and there are no bands.
    """
    num_steps = common_steps(recorded.path, folder.path)
    what = f"{folder.path} against {recorded.path}, {num_steps} steps"
    shortfall = _shortfall(folder, num_steps, end)
    if why := _why_inexact([recorded, folder], config, is_replay=is_replay):
        bands = _bands(recorded.path, folder.path)
        if not bands and shortfall is None:
            raise _no_bands(recorded.path, why)
        bands += _eval_bands(recorded.path, folder.path, config.eval.confidence)
        failed = next((band for band in bands if not band.holds), None)
        difference = shortfall
        if difference is None and failed is not None:
            difference = (
                f"grpo step {failed.step}: {failed.metric} was {failed.expected:.6g}, is "
                f"{failed.seen:.6g}, outside ± {failed.width:.3g}"
            )
        verdict = "within the bands" if difference is None else f"different: {difference}"
        lines = [f"Not byte for byte: {for_markdown(why)}.", "", _table(bands)]
    else:
        found = first_mismatches(
            recorded.path, folder.path, only_learner=is_replay, is_whole=is_whole
        )
        difference = str(found[0]) if found else shortfall
        verdict = f"different: {difference}" if difference else "the same, byte for byte"
        parts = "metrics and checkpoints" if is_replay else "metrics, episodes, checkpoints, evals"
        lines = [
            f"Compared: {parts}; time/* is ignored.",
            "",
            *(f"- {for_markdown(str(each))}" for each in found),
        ]
    path = folder.path / "reproduction.md"
    write_text(
        path,
        "\n".join([f"# {for_markdown(what)}", "", f"**{for_markdown(verdict)}**", "", *lines])
        + "\n",
    )
    progress.note(f"{what}: {verdict}\n{path}")
    return Reproduction(
        path=folder.path,
        num_steps=num_steps,
        is_same=difference is None,
        is_exact=why is None,
        first_difference=difference,
    )


def _shortfall(folder: RunFolder, num_steps: int, end: int) -> str | None:
    """Say that a run ended before the step `end`; None if it has reached it."""
    if num_steps >= end:
        return None
    cause = folder.record.cause
    return f"it ended after step {num_steps} of {end}" + (f": {cause}" if cause else "")


def _no_bands(path: Path, why: str) -> RunFolderError:
    return RunFolderError(
        f"{path} cannot be compared with a repetition: {why}, so their bytes may differ, and no "
        "step of GRPO in both has mismatch/mean, from which the allowed distances are computed"
    )


def _why_inexact(folders: Sequence[RunFolder], config: RunConfig, *, is_replay: bool) -> str | None:
    """Say why the bytes may differ; None if they must be equal."""
    devices = {str(each.record.facts.get("device")) for each in folders} - {"None"}
    if devices - {"cpu"}:
        return f"it ran on {' and '.join(sorted(devices))}, where the order of sums is not fixed"
    if not config.engine.capabilities.is_exact and not is_replay:
        return f"engine={config.engine.type} may sample other tokens for an equal request"
    if any(place.is_served for place in find_teachers(config)):
        return "the logprobs of a teacher on a server depend on what it computes at once"
    return None


def _bands(expected: Path, seen: Path) -> list[Band]:
    found: list[Band] = []
    old, new = (records_of(path, "grpo") for path in (expected, seen))
    mismatches: list[float] = []
    for step in sorted({*old} & {*new}):
        paths = [episodes_path(path, step) for path in (expected, seen)]
        ours, theirs = (each[step].get("mismatch/mean") for each in (new, old))
        if theirs is not None:
            mismatches.append(theirs)
            if ours is not None:
                found.append(mismatch_band(step, theirs, ours))
        if all(path.exists() for path in paths) and mismatches:
            groups = [read_episodes(path) for path in paths]
            found += step_bands(step, fmean(mismatches), *groups)
    return found


def _eval_bands(expected: Path, seen: Path, confidence: float) -> list[Band]:
    old, new = own_evaluations(expected), own_evaluations(seen)
    common = [key for key in old if key in new]
    return [band for key in common for band in eval_bands(old[key], new[key], confidence)]


def _table(bands: Sequence[Band]) -> str:
    rows = [
        [
            *(str(band.step), band.metric, f"{band.expected:.6g}", f"{band.seen:.6g}"),
            *(f"± {band.width:.3g}", "yes" if band.holds else "no"),
        ]
        for band in bands
    ]
    return table(["step", "metric", "recorded", "now", "band", "within"], rows)


def _reject_or_notify(
    allow: Collection[str], progress: Progress, differences: Sequence[Difference]
) -> None:
    for each in differences:
        if each.kind not in ALLOWABLE or each.kind in allow:
            progress.note(f"not as recorded: {each}")
    _reject(allow, differences)


def _reject(allow: Collection[str], differences: Sequence[Difference]) -> None:
    rejected = [each for each in differences if each.kind in ALLOWABLE and each.kind not in allow]
    if rejected:
        kinds = list(dict.fromkeys(each.kind for each in rejected))
        raise RunFolderError(
            "it would not be the same run:\n"
            + "\n".join(f"  {each}" for each in rejected)
            + f"\nrestore that, or allow the difference: --allow {','.join(kinds)} (from Python: "
            f"allow={kinds})"
        )


def _reject_unknown(allow: Collection[str]) -> None:
    for kind in allow:
        if kind not in ALLOWABLE:
            raise RunFolderError(
                f"--allow {kind!r}: expected some of {', '.join(ALLOWABLE)} (from Python as a "
                'list: allow=["code"])'
            )
