"""What a person sees while a run goes on: a live line on a terminal, else one plain line a step.

Goes to stderr: stdout is for results. Shows numbers of the metrics records, computes none but
the time that is left. Refuses to be a log: what must be kept is in the run folder.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

NUMBERS = {  # shown label to metric's key and format; those that a record lacks are left out
    "reward": ("reward/mean", "{:.3f}"),
    "success": ("success/rate", "{:.2f}"),
    "loss": ("loss/supervised", "{:.3f}"),
    "tokens/s": ("time/tokens_per_s", "{:.0f}"),
}
BAR_WIDTH = 24  # columns; the bar is left out of terminals narrower than MIN_WIDTH_FOR_BAR
MIN_WIDTH_FOR_BAR = 100


def tell_person(text: str) -> None:
    """A line on stderr, where there is no stage to show."""
    print(text, file=sys.stderr, flush=True)


class Progress(Protocol):
    """Told by the pipeline what happens. Used by one thread."""

    def stage(self, name: str, total_steps: int) -> None:
        """A stage of `total_steps` begins; the one before it has ended."""

    def advance(self, record: Mapping[str, Any]) -> None:
        """A step of the stage is done; `record` is what goes to metrics.jsonl, `step` from 1."""

    def note(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Take the live line away."""


def build_progress(stream: TextIO | None = None) -> Progress:
    """A live line if `stream` (stderr if None) is a terminal, else plain lines."""
    stream = stream or sys.stderr
    return LiveProgress(Console(file=stream)) if stream.isatty() else PlainProgress(stream)


class PlainProgress:
    """One line a step, flushed: for files, pipes and CI."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stage = _Stage("", 0)

    def stage(self, name: str, total_steps: int) -> None:
        self._stage = _Stage(name, total_steps)

    def advance(self, record: Mapping[str, Any]) -> None:
        left_s = self._stage.left_s(record["step"])
        title = f"{self._stage.name} {record['step']}/{self._stage.total_steps}"
        self.note(" ".join([title, *_numbers(record), f"left {clock(left_s)}"]))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is live here."""


class LiveProgress:
    """One line that changes in place; notes scroll away above it."""

    def __init__(self, console: Console) -> None:
        bar = [BarColumn(BAR_WIDTH)] if console.width >= MIN_WIDTH_FOR_BAR else []
        self._live = RichProgress(
            *bar,
            TextColumn(
                "[bold]{task.description}[/] {task.completed}/{task.total}{task.fields[numbers]}",
                table_column=Column(no_wrap=True, overflow="ellipsis"),  # where it is too narrow
            ),
            console=console,
            transient=True,
        )
        self._stage = _Stage("", 0)

    def stage(self, name: str, total_steps: int) -> None:
        self._stage = _Stage(name, total_steps)
        for shown in self._live.task_ids:
            self._live.remove_task(shown)
        self._live.add_task(name, total=total_steps, numbers="")
        self._live.start()

    def advance(self, record: Mapping[str, Any]) -> None:
        left_s = self._stage.left_s(record["step"])
        numbers = "".join(f" · {n}" for n in [f"left {clock(left_s)}", *_numbers(record)])
        for shown in self._live.task_ids:
            self._live.update(shown, completed=record["step"], numbers=numbers)

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


class _Stage:
    """A stage's name, its length, and how fast it goes in this process."""

    def __init__(self, name: str, total_steps: int) -> None:
        self.name = name
        self.total_steps = total_steps
        self._started_s = time.monotonic()
        self._num_done = 0

    def left_s(self, step: int) -> float:
        """Seconds left after `step`, at the pace since the stage began here, maybe resumed."""
        self._num_done += 1
        pace_s = (time.monotonic() - self._started_s) / self._num_done
        return pace_s * max(self.total_steps - step, 0)


def clock(seconds: float) -> str:
    """A duration as people write it: 0:07, 3:12, 1:02:45."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _numbers(record: Mapping[str, Any]) -> list[str]:
    return [
        f"{label} {form.format(record[key])}"
        for label, (key, form) in NUMBERS.items()
        if record.get(key) is not None
    ]
