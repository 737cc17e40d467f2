"""Deliver a run's steps and evaluations to one tracker, in a thread of its own: no step waits.

A call that fails is repeated after a growing delay. The run is told of the first failure, and when
the tracker works again. What has been delivered is noted in `trackers/NAME.json` of the run folder,
with the tool's id of the run: a resumed run continues there, and sends nothing a second time.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.record import EndStatus
from openenv_pipe.system.copies import copied
from openenv_pipe.system.files import read_json, write_json
from openenv_pipe.system.untrusted_text import quoted
from openenv_pipe.system.user_code import is_ours
from openenv_pipe.trackers.base import (
    EvaluationTracker,
    Opened,
    TrackedEvaluation,
    TrackedRun,
    TrackedStep,
    Tracker,
)

FOLDER = "trackers"  # of a run folder
MAX_PENDING = 100_000  # steps and evaluations that wait for a tool that does not answer
MAX_PENDING_EPISODES = 2000  # that wait; they are large, so the older ones are given up
MAX_ATTEMPTS = 5  # for one step or evaluation, before it is left out
FIRST_DELAY_S = 1.0  # before a failed call is repeated; doubled after each further failure
MAX_DELAY_S = 60.0
END_LIMIT_S = 60.0  # for everything that is left at the end of a run


class State(BaseModel):
    """`trackers/NAME.json`: how the tool knows the run, and what it has been sent."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run_id: str | None = Field(max_length=200)
    num_records: int = Field(ge=0)
    evaluations: list[str] = []  # that were sent, as "LABEL of step STEP"


def read_state(folder: Path, name: str) -> State | None:
    """Return the state of a tracker in a run folder; None if it is missing or damaged."""
    try:
        return State.model_validate(read_json(folder / FOLDER / f"{name}.json"))
    except (RunFolderError, ValidationError):
        return None


@dataclass(slots=True)
class _Waiting:
    """A step or an evaluation that has not been delivered."""

    item: TrackedStep | TrackedEvaluation
    num_attempts: int = 0  # that failed

    @property
    def num_episodes(self) -> int:
        return sum(len(group.episodes) for group in self.item.groups)


class Delivery:
    """Passes steps to one tracker. Its own methods never wait for the tool, except `join`."""

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, notify: Callable[[str], None]
    ) -> None:
        """notify: called with sentences for people, from this object's thread."""
        self._name = name
        self._tracker = tracker
        self._run = run
        self._notify = notify
        self._state = read_state(run.folder, name) or State(run_id=None, num_records=0)
        self._unfinished: list[str] = []  # evaluations that the tool gets with the next step
        self._is_open = False
        self._num_lost = 0
        self._num_failures = 0  # since the last call that succeeded
        self._pending: deque[_Waiting] = deque()
        self._with_episodes: deque[_Waiting] = deque()  # those of `_pending` with episodes
        self._end: tuple[EndStatus, Mapping[str, float]] | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, item: TrackedStep | TrackedEvaluation) -> None:
        """Take a step to deliver, or an evaluation, if the tracker takes evaluations.

        If too many wait, the oldest lose their episodes.
        """
        if isinstance(item, TrackedEvaluation) and not isinstance(self._tracker, EvaluationTracker):
            return
        with self._changed:
            self._pending.append(_Waiting(item))
            if item.groups:
                self._with_episodes.append(self._pending[-1])
            while (
                len(self._with_episodes) > 1
                and sum(each.num_episodes for each in self._with_episodes) > MAX_PENDING_EPISODES
            ):
                oldest = self._with_episodes.popleft()
                oldest.item = replace(oldest.item, groups=())
            if len(self._pending) > MAX_PENDING:
                self._remove_first()
                self._num_lost += 1
            self._changed.notify()

    def end(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        """Take the end of the run. No step comes after it."""
        with self._changed:
            self._end = (status, summary)
            self._changed.notify()

    def join(self, limit_s: float) -> None:
        """Wait until everything is delivered or given up, at most `limit_s` seconds."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._notify(
                f"tracker {self._name} did not accept everything within {END_LIMIT_S:g} s; "
                "metrics.jsonl and episodes/ have it all"
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._is_open or self._pending or self._end is not None
                )
                is_ending = self._end is not None
            try:
                if self._advance():
                    return
            except BaseException as error:  # whatever a client raises must not end the run
                self._fail(error)
                if is_ending:
                    num_left = len(self._pending) + self._num_lost
                    self._notify(
                        f"tracker {self._name} has not received {num_left} steps and the end of "
                        "the run; metrics.jsonl and episodes/ have it all"
                    )
                    return
                delay_s = min(FIRST_DELAY_S * 2 ** (self._num_failures - 1), MAX_DELAY_S)
                with self._changed:
                    self._changed.wait_for(lambda: self._end is not None, delay_s)
            else:
                if self._num_failures:
                    self._notify(f"tracker {self._name} works again")
                self._num_failures = 0

    def _advance(self) -> bool:
        """Make the next call that is due; True if it was the last one."""
        if not self._is_open:
            self._note(self._tracker.open(copied(replace(self._run, saved_id=self._state.run_id))))
            self._is_open = True
        with self._changed:
            first = self._pending[0] if self._pending else None
            end = self._end
        if first is None:
            if end is not None:
                self._tracker.close(*end)
            return end is not None
        item = first.item if is_ours(self._tracker) else copied(first.item)
        if isinstance(item, TrackedEvaluation):
            self._send_evaluation(item)
        elif item.index >= self._state.num_records:
            self._tracker.log(item)
            self._write_sent(self._unfinished, num_records=item.index + 1)
            self._unfinished = []
        self._drop(first)
        return False

    def _send_evaluation(self, evaluation: TrackedEvaluation) -> None:
        name = f"{evaluation.report.label} of step {evaluation.report.step}"
        if name in self._state.evaluations or not isinstance(self._tracker, EvaluationTracker):
            return
        if self._tracker.log_evaluation(evaluation) is True:
            self._unfinished.append(name)
        else:
            self._write_sent([name])

    def _write_sent(self, evaluations: Sequence[str], **fields: int) -> None:
        evaluations = [*self._state.evaluations, *evaluations]
        self._write(self._state.model_copy(update={"evaluations": evaluations, **fields}))

    def _note(self, opened: Opened) -> None:
        """Note the tool's id of the run, and what the tool has of it."""
        is_continued = opened.run_id is not None and opened.run_id == self._state.run_id
        num_records = self._state.num_records if is_continued else 0
        if opened.num_records is not None:
            num_records = opened.num_records
        # A tool without any record may have lost the run.
        evaluations = self._state.evaluations if is_continued and num_records else []
        self._write(State(run_id=opened.run_id, num_records=num_records, evaluations=evaluations))

    def _write(self, state: State) -> None:
        self._state = state
        if state.run_id is not None:
            path = self._run.folder / FOLDER / f"{self._name}.json"
            path.parent.mkdir(exist_ok=True)
            write_json(path, state.model_dump(mode="json"))

    def _drop(self, first: _Waiting) -> None:
        """Remove `first` from the head, unless an overflow has removed it meanwhile."""
        with self._changed:
            if self._pending and self._pending[0] is first:
                self._remove_first()

    def _remove_first(self) -> None:
        removed = self._pending.popleft()
        if self._with_episodes and self._with_episodes[0] is removed:
            self._with_episodes.popleft()

    def _fail(self, error: BaseException) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            self._notify(
                f"tracker {self._name} failed ({type(error).__name__}: {quoted(str(error), 300)}); "
                "the run goes on, and the call is repeated"
            )
        if self._is_open and self._pending:
            first = self._pending[0]
            first.num_attempts += 1
            if first.num_attempts >= MAX_ATTEMPTS:
                self._drop(first)
                self._num_lost += 1
