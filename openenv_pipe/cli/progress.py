"""Progress on stderr: one live line on a terminal, otherwise one plain line for each step.

Results go to stdout.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, TextIO

from openenv_pipe.system.progress import LineProgress, Progress, StagePace, clock, step_numbers

BAR_WIDTH = 24  # columns; terminals narrower than MIN_WIDTH_FOR_BAR get no bar
MIN_WIDTH_FOR_BAR = 100


def tell_person(text: str, stream: TextIO | None = None) -> None:
    """Print a line, to stderr unless another stream is named."""
    print(text, file=stream or sys.stderr, flush=True)


def build_progress(stream: TextIO | None = None) -> Progress:
    """A live line if `stream` (default: stderr) is a terminal, otherwise plain lines."""
    stream = stream or sys.stderr
    if stream.isatty():
        return LiveProgress(stream)
    return LineProgress(partial(tell_person, stream=stream))


class LiveProgress:
    """One line that changes in place; notes scroll away above it."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        """width: in columns; default: the terminal's."""
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        console = Console(file=stream, width=width)
        bar = [BarColumn(BAR_WIDTH)] if console.width >= MIN_WIDTH_FOR_BAR else []
        self._live = RichProgress(
            *bar,
            TextColumn(
                "[bold]{task.description}[/] {task.completed}/{task.total}{task.fields[numbers]}",
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            ),
            console=console,
            transient=True,
        )
        self._pace = StagePace("", 0)

    def stage(self, name: str, total_steps: int) -> None:
        self._pace = StagePace(name, total_steps)
        for shown in self._live.task_ids:
            self._live.remove_task(shown)
        self._live.add_task(name, total=total_steps, numbers="")
        self._live.start()

    def advance(self, record: Mapping[str, Any]) -> None:
        left_s = self._pace.left_s(record["step"])
        numbers = "".join(f" · {n}" for n in [f"left {clock(left_s)}", *step_numbers(record)])
        for shown in self._live.task_ids:
            self._live.update(shown, completed=record["step"], numbers=numbers)

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()
