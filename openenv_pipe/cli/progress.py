"""Progress on stderr: live on a terminal, otherwise plain lines. Results go to stdout."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from openenv_pipe.cli.streams import is_live
from openenv_pipe.system.progress import (
    EpisodeCount,
    LineProgress,
    Progress,
    StagePace,
    clock,
    step_numbers,
)
from openenv_pipe.system.untrusted_text import for_people

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

MAX_BAR_WIDTH = 24  # columns of the terminal


def notify_user(text: str, stream: TextIO | None = None) -> None:
    """Print text of any origin, to stderr unless another stream is named."""
    print(for_people(text), file=stream or sys.stderr, flush=True)


def build_progress(stream: TextIO | None = None) -> Progress:
    """Return a live line if `stream` (default: stderr) can show one, otherwise plain lines."""
    stream = stream or sys.stderr
    if is_live(stream):
        return LiveProgress(stream)
    return LineProgress(partial(notify_user, stream=stream))


class LiveProgress:
    """One line that changes in place; notes scroll away above it."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        """width: in columns; default: the terminal's."""
        from rich.progress import BarColumn
        from rich.progress import Progress as RichProgress

        from openenv_pipe.cli.console import open_console

        console = open_console(file=stream, width=width)
        self._bar_width = min(MAX_BAR_WIDTH, console.width // 6)
        # Each within the one before it: what it is, its beginning, and its episodes.
        self._phases: list[tuple[str, float, EpisodeCount]] = []
        self._pace: StagePace | None = None  # None: there is no stage
        self._numbers: list[str] = []
        self._live = RichProgress(
            BarColumn(self._bar_width), _line_column(self._line), console=console, transient=True
        )
        self._stage_bar = self._live.add_task("", total=1, visible=False)
        self._phase_bar = self._live.add_task("", total=None, visible=False)

    @contextmanager
    def phase(self, text: str, count: EpisodeCount | None = None) -> Iterator[None]:
        phase = (text, time.monotonic(), count or EpisodeCount())
        self._phases.append(phase)
        self._show()
        try:
            yield
        finally:
            if phase in self._phases:  # else `close` has ended it
                self._phases.remove(phase)
            self._show()

    def stage(self, name: str, total_steps: int) -> None:
        self._pace, self._numbers = StagePace(name, total_steps), []
        self._live.update(self._stage_bar, completed=0, total=total_steps)
        self._show()

    def advance(self, record: Mapping[str, Any]) -> None:
        assert self._pace is not None
        self._pace.advance(record["step"])
        self._numbers = step_numbers(record)
        self._live.update(self._stage_bar, completed=record["step"])

    def remind(self, text: str) -> None:
        """Do nothing: the line shows the phase."""

    def note(self, text: str) -> None:
        self._live.console.print(for_people(text), highlight=False)

    def close(self) -> None:
        self._live.stop()  # This draws the last state, which is then removed.
        self._phases, self._pace = [], None

    def _show(self) -> None:
        """Show the line while there is a phase or a stage."""
        if not (self._phases or self._pace):
            self._live.stop()
            return
        self._live.update(self._phase_bar, visible=bool(self._phases))
        self._live.update(self._stage_bar, visible=bool(self._pace and not self._phases))
        self._live.start()

    def _line(self) -> str:
        """Return the text beside the bar: what is done now, and the numbers that fit.

        The bar of a phase follows its episodes; without any, it has no end.
        """
        phases, pace = list(self._phases), self._pace  # Another thread may end them meanwhile.
        if phases:
            text, started_s, count = phases[-1]
            # Not by `update`, for which None is no change: the last phase's total would stay.
            bar = self._live.tasks[self._phase_bar]
            bar.completed, bar.total = count.finished, count.total or None
            counted = f" · {count.finished}/{count.total} episodes" if count.total else ""
            return f"{text}{counted} · {clock(time.monotonic() - started_s)}"
        if pace is None:
            return ""
        line = pace.title
        for number in (pace.left(), *self._numbers):
            if self._bar_width + 1 + len(line) + len(number) + 3 <= self._live.console.width:
                line += f" · {number}"
        return line


def _line_column(line: Callable[[], str]) -> "ProgressColumn":
    """Make a column of rich's progress that shows what `line` returns at each refresh."""
    from rich.progress import ProgressColumn
    from rich.table import Column
    from rich.text import Text

    class Line(ProgressColumn):
        def render(self, task: object) -> Text:
            return Text(line())

    return Line(table_column=Column(no_wrap=True, overflow="ellipsis"))
