"""Progress on stderr: live on a terminal, otherwise plain lines. Results go to stdout."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from openenv_pipe.system.foreign_text import for_people
from openenv_pipe.system.progress import LineProgress, Progress, StagePace, clock, step_numbers

if TYPE_CHECKING:
    from rich.live import Live

    from openenv_pipe.system.tables import Table

MAX_BAR_WIDTH = 24  # columns of the terminal


def tell_person(text: str, stream: TextIO | None = None) -> None:
    """Print text of any origin, to stderr unless another stream is named."""
    print(for_people(text), file=stream or sys.stderr, flush=True)


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
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        from openenv_pipe.cli.console import open_console

        console = open_console(file=stream, width=width)
        self._bar_width = min(MAX_BAR_WIDTH, console.width // 6)
        self._live = RichProgress(
            BarColumn(self._bar_width),
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
        title = f"{self._pace.name} {record['step']}/{self._pace.total_steps}"
        available = self._live.console.width - self._bar_width - 1 - len(title)
        numbers = ""
        for number in (f"left {clock(left_s)}", *step_numbers(record)):
            if len(numbers) + len(number) + 3 <= available:
                numbers += f" · {number}"
        for shown in self._live.task_ids:
            self._live.update(shown, completed=record["step"], numbers=numbers)

    def note(self, text: str) -> None:
        self._live.console.print(for_people(text), highlight=False)

    def close(self) -> None:
        self._live.stop()


class SweepTable:
    """The progress of a sweep: a live table of its jobs on a terminal, otherwise plain lines."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """stream: default: stderr."""
        self._stream = stream or sys.stderr
        self._live: Live | None = None

    def note(self, text: str) -> None:
        if self._live is None:
            tell_person(text, self._stream)
        else:
            self._live.console.print(for_people(text), highlight=False)

    def job(self, line: str) -> None:
        if not self._stream.isatty():  # on a terminal the table shows it
            tell_person(line, self._stream)

    def table(self, make: "Callable[[], Table]") -> None:
        if not self._stream.isatty():
            return
        from openenv_pipe.cli.console import Cleaned, open_console

        if self._live is None:
            from rich.live import Live

            console = open_console(file=self._stream)
            self._live = Live(console=console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(Cleaned(make()), refresh=True)

    def end_table(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
