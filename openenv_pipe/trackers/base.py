"""The interface of trackers, and what they are told about a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import DURING
from openenv_pipe.runs.record import EndStatus
from openenv_pipe.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class ParentRun:
    """The run that a fork or a reproduction is made from."""

    kind: str  # fork, reproduction or recording
    id: str  # "wordle/0007"
    path: str  # its folder at that time
    checkpoint: str | None
    tracker_run_id: str | None  # in the same tool; None: it was not tracked there


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker is told about the run when it begins or resumes."""

    folder: Path
    id: str  # "wordle/0007"
    config: Mapping[str, Any]  # the whole configuration, with marks in place of secrets
    sweep: str | None  # the stamp of the sweep that the run belongs to
    parent: ParentRun | None
    saved_id: str | None = None  # what `open` returned in an earlier attempt; None: there was none


def origin_of(run: TrackedRun, id_key: str) -> dict[str, Any]:
    """Return the run's folder, its sweep, and the run that it is made from, as JSON.

    id_key: the key of the parent's id in the tool.
    """
    origin: dict[str, Any] = {"run": run.id, "folder": str(run.folder), "sweep": run.sweep}
    if run.parent is not None:
        origin["parent"] = {
            "kind": run.parent.kind,
            "run": run.parent.id,
            "folder": run.parent.path,
            "checkpoint": run.parent.checkpoint,
            id_key: run.parent.tracker_run_id,
        }
    return origin


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedStep:
    index: int  # of its line in metrics.jsonl, from 0; a resumed run repeats indices
    record: Mapping[str, Any]  # the line: `step`, `stage`, and numbers by name, None where missing
    groups: Sequence[Group] = ()  # its episodes; none in the warm start and for earlier attempts

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the record by `stage/name`, because each stage counts its own steps."""
        stage = self.record["stage"]
        return {
            f"{stage}/{name}": value
            for name, value in self.record.items()
            if isinstance(value, int | float) and name != "step"
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedEvaluation:
    index: int  # of the line in metrics.jsonl that comes next
    report: EvalReport
    groups: Sequence[Group] = ()  # its episodes; none for evaluations of earlier attempts

    @property
    def step(self) -> int:
        """The step of GRPO that the model has taken; 0 for scripted policies."""
        return self.report.step or 0

    @property
    def numbers(self) -> dict[str, float]:
        """Success and reward by `eval/label/name`; those between steps share the label `during`."""
        label = self.report.label
        return results_of("during" if label.startswith(DURING) else label, self.report)


def results_of(label: str, report: EvalReport) -> dict[str, float]:
    """Return the means of an evaluation by the names that trackers get."""
    measures = {"success": report.success, "reward": report.reward}
    return {f"eval/{label}/{name}": each.mean for name, each in measures.items() if each}


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """How a tool knows the run, which a later attempt is told as `saved_id`."""

    run_id: str | None  # None: the tool starts again and receives all records of the run
    num_records: int | None = None  # that the tool already has; None: those sent under this id


class Tracker(Protocol):
    """Sends one run to one tool. All methods are called in the same thread, one at a time.

    They may take their time and may raise: the call is repeated later, and the run goes on.
    """

    def open(self, run: TrackedRun) -> Opened:
        """Connect to the tool; begin the run there, or continue the one of `run.saved_id`."""

    def log(self, step: TrackedStep) -> None:
        """Send one step. Each is sent once, in order, unless an earlier call has failed."""

    def close(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        """Send everything that is left, and end the run.

        summary: results of the run's evaluations by name.
        """


@runtime_checkable
class EvaluationTracker(Tracker, Protocol):
    """A tracker that also gets each evaluation when it is done."""

    def log_evaluation(self, evaluation: TrackedEvaluation) -> bool | None:
        """Send one evaluation. Each is sent once, unless an earlier call has failed.

        Returns True if the tool has all of it with the next step only: a run that is resumed
        before that step sends it again.
        """
