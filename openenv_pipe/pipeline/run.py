"""One attempt at a run: hold its folder, train, and record how and why it ended."""

import contextlib
import errno
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import OutOfMemoryError, PipeError, UserError
from openenv_pipe.models.teacher import give_teachers
from openenv_pipe.pipeline.build import assembled
from openenv_pipe.pipeline.callbacks import Callback
from openenv_pipe.pipeline.evaluations import Evaluations
from openenv_pipe.pipeline.facts import find_facts
from openenv_pipe.pipeline.group_sources import PlayedGroups
from openenv_pipe.pipeline.league import build_leagues
from openenv_pipe.pipeline.metrics_log import finish_despite_cancel
from openenv_pipe.pipeline.servers import OwnServers, ServerProvider
from openenv_pipe.pipeline.stage import Evaluator
from openenv_pipe.pipeline.stages import StageRunner
from openenv_pipe.reports.report import write_report
from openenv_pipe.runs.checkpoints import all_checkpoints, fork_command, fork_origin
from openenv_pipe.runs.differences import Difference, find_other_facts
from openenv_pipe.runs.evals import read_reports
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.record import EndStatus
from openenv_pipe.system.out_of_memory import as_out_of_memory
from openenv_pipe.system.progress import LineProgress, Progress
from openenv_pipe.system.stop_request import StopRequest
from openenv_pipe.trackers.base import results_of
from openenv_pipe.trackers.build import Trackers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt at a run: its configuration, first checkpoint and last step."""

    folder: RunFolder
    config: RunConfig
    checkpoint: Path | None = None  # to resume from; None: start at the beginning
    stop_after: int | None = None  # steps of GRPO; None: all that the configuration asks for
    servers: ServerProvider = field(default_factory=OwnServers)
    other_verdicts: Sequence[Path] = ()  # folders of the judge's answers in a reproduced run
    # `on_differences` gets the facts that differ from `expected` before episodes; it may raise.
    expected: Mapping[str, JsonValue] = field(default_factory=dict)
    on_differences: Callable[[list[Difference]], None] | None = None
    trackers: Trackers | None = None  # `run` sets it


@dataclass(frozen=True, kw_only=True, slots=True)
class RunControl:
    """How the caller follows, stops and continues a run. By default progress goes to the log."""

    progress: Progress = field(default_factory=lambda: LineProgress(_log.info))
    stop: StopRequest = field(default_factory=StopRequest)
    callbacks: Sequence[Callback] = ()
    evaluates: bool = True  # False leaves out the evaluations
    # What the user enters to continue the run; `{folder}` stands for the run's folder.
    continued_by: str = "openenv-pipe train --resume {folder}"

    def continuation(self, folder: RunFolder) -> str:
        """Return what the user enters to continue the run."""
        return self.continued_by.replace("{folder}", str(folder.path))


# Returns why training ended before its last step, if it did.
Training = Callable[[Attempt, RunControl], Coroutine[Any, Any, str | None]]


def run(attempt: Attempt, control: RunControl, training: Training | None = None) -> None:
    """Execute an attempt at a run until it ends, and write its record and its report.

    training: the coroutine that trains; None: play episodes and train on them.

    Raises:
        KeyboardInterrupt: `control.stop` ended the run, whose state has been saved.
        Exception: the run failed. The cause is in its record.
    """
    folder, progress = attempt.folder, control.progress
    with folder.held():
        progress.note(f"run {folder.record.id} in {folder.path}")
        how = control.continuation(folder)
        control.stop.farewell = f"to continue from the last checkpoint: {how}"
        trackers = None
        try:
            if (folder.path / "report.md").exists():  # It says that an earlier attempt ended.
                _write_report(folder, progress)
            trackers = Trackers(attempt.config, folder, progress.note)
            attempt = replace(attempt, trackers=trackers)
            reason = control.stop.run((training or play_and_learn)(attempt, control))
            folder.finish("finished", cause=reason)
        except BaseException as error:
            readable = as_out_of_memory(error)
            _end_early(folder, control, readable or error)
            if trackers is not None:
                interrupted = isinstance(error, KeyboardInterrupt)
                _close_trackers(trackers, folder, "interrupted" if interrupted else "failed")
            if readable is not None:
                raise readable from error
            raise
        _close_trackers(trackers, folder, "finished")
        progress.close()
        if reason is not None:
            progress.note(reason)
        progress.note(f"report: {_write_report(folder, progress)}")


async def play_and_learn(attempt: Attempt, control: RunControl) -> str | None:
    """Play episodes and train on them, in an attempt's folder, which the caller holds.

    Returns why training ended before its last step, if it did.
    """
    folder, progress = attempt.folder, control.progress
    async with assembled(
        attempt.config,
        folder.logs,
        [folder.verdicts, *attempt.other_verdicts],
        progress,
        servers=attempt.servers,
    ) as components:
        config, rollout = attempt.config, components.rollout
        assert rollout is not None
        await components.compute(give_teachers, components.policy, config)
        facts = {
            **rollout.facts(),
            **rollout.engine.facts(),
            **await components.compute(find_facts, config, components.policy, rollout),
        }
        if attempt.on_differences:
            attempt.on_differences(find_other_facts(attempt.expected, facts))
        folder.update(**facts)
        leagues = build_leagues(config, rollout, components.policy, components.torch_thread)
        source = PlayedGroups(config, rollout, leagues)
        evaluator = Evaluator()
        can_play = config.host.has_environment or not config.agent.needs_environment
        if control.evaluates and can_play and config.agent.plays_on_demand:
            evaluator = Evaluations(
                config=config,
                rollout=rollout,
                folder=folder.path,
                progress=progress,
                clear_engine=source.clear_engine,
                trackers=attempt.trackers,
            )
        runner = StageRunner(
            components,
            source,
            folder,
            progress,
            evaluator=evaluator,
            origin=fork_origin(folder.record),
            stop_after=attempt.stop_after,
            callbacks=control.callbacks,
            trackers=attempt.trackers,
        )
        try:
            return await runner.run(attempt.checkpoint)
        finally:
            await finish_despite_cancel(runner.close(saves=not control.stop.is_repeated))


def _close_trackers(trackers: Trackers, folder: RunFolder, status: EndStatus) -> None:
    """Send the results of the evaluations, and end the run in all trackers."""
    summary: dict[str, float] = {}
    for report in read_reports(folder.path).values():  # Of equal labels, the newer comes later.
        summary |= results_of(report.label, report)
    trackers.close(status, summary)


def _write_report(folder: RunFolder, progress: Progress) -> Path:
    with progress.phase("writing the report"):
        return write_report(folder)


def _end_early(folder: RunFolder, control: RunControl, error: BaseException) -> None:
    """Record why the run ended, write its report, and report how to go on."""
    progress, interrupted = control.progress, isinstance(error, KeyboardInterrupt)
    cause = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
    progress.close()
    # A second error here, for example from a full disk, must not hide the first one.
    with contextlib.suppress(OSError, PipeError):
        folder.finish("interrupted" if interrupted else "failed", cause=cause)
        if isinstance(error, PipeError) and folder.error_text.exists():
            error.whole_text = folder.error_text
        what = "interrupted" if interrupted else "the run failed"
        progress.note(f"{what}; report so far: {_write_report(folder, progress)}")
    if isinstance(error, UserError) and not all_checkpoints(folder.path):
        # A resumed run has the same configuration, so it would end with the same error.
        progress.note("nothing was trained; correct the error and start a new run")
        return
    if isinstance(error, OutOfMemoryError):
        # A resumed run keeps all of the keys that the error names.
        how = fork_command(folder.path) or "start a new run"
        progress.note(f"to continue with other values: {how}")
        return
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    first = "free some space, then " if is_full else ""
    how = f"to continue: {first}{control.continuation(folder)}"
    progress.note(how)
    if interrupted:
        error.args = (f"{folder.record.id} was interrupted; {how}",)
