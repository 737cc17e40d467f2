"""What a run reports while it works: stages, steps and notes, as lines of text.

The library logs these lines (`LineProgress(logger.info)`). The command line shows them on a
terminal (`cli/progress.py`). The only number computed here is the time that is left.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

NUMBERS = {  # shown label to metric's key and format; a metric that a record lacks is left out
    "reward": ("reward/mean", "{:.3f}"),
    "success": ("success/rate", "{:.2f}"),
    "loss": ("loss/supervised", "{:.3f}"),
    "tokens/s": ("time/tokens_per_s", "{:.0f}"),
}


class Progress(Protocol):
    """Receives what the pipeline reports. One thread calls it."""

    def stage(self, name: str, total_steps: int) -> None:
        """A stage of `total_steps` begins; the one before it has ended."""

    def advance(self, record: Mapping[str, Any]) -> None:
        """A step of the stage is done; `record` is its line of metrics.jsonl, `step` from 1."""

    def note(self, text: str) -> None:
        """Report a sentence."""

    def close(self) -> None:
        """Nothing more is reported about the current stage."""


class LineProgress:
    """Passes one line for each step, and each note, to a function such as `logger.info`."""

    def __init__(self, emit: Callable[[str], object]) -> None:
        self._emit = emit
        self._pace = StagePace("", 0)

    def stage(self, name: str, total_steps: int) -> None:
        self._pace = StagePace(name, total_steps)

    def advance(self, record: Mapping[str, Any]) -> None:
        left_s = self._pace.left_s(record["step"])
        title = f"{self._pace.name} {record['step']}/{self._pace.total_steps}"
        self.note(" ".join([title, *step_numbers(record), f"left {clock(left_s)}"]))

    def note(self, text: str) -> None:
        self._emit(text)

    def close(self) -> None:
        """Lines need no end."""


class StagePace:
    """A stage's name, its number of steps, and its speed in this process."""

    def __init__(self, name: str, total_steps: int) -> None:
        self.name = name
        self.total_steps = total_steps
        self._started_s = time.monotonic()
        self._num_done = 0

    def left_s(self, step: int) -> float:
        """Seconds left after `step`, at the pace since this process began the stage."""
        self._num_done += 1
        pace_s = (time.monotonic() - self._started_s) / self._num_done
        return pace_s * max(self.total_steps - step, 0)


def clock(seconds: float) -> str:
    """A duration as people write it: 0:07, 3:12, 1:02:45."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def step_numbers(record: Mapping[str, Any]) -> list[str]:
    """The metrics of a step that a person watches, as "label value"."""
    return [
        f"{label} {form.format(record[key])}"
        for label, (key, form) in NUMBERS.items()
        if record.get(key) is not None
    ]
