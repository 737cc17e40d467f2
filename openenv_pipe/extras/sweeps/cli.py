"""`train -m`: the progress of a sweep, its stop by signals, and its exit code."""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

import typer
from rich.live import Live

from openenv_pipe.cli.arguments import with_runs_dir
from openenv_pipe.cli.console import Cleaned, open_console, print_table
from openenv_pipe.cli.control import command_line, stop_signals
from openenv_pipe.cli.progress import notify_user
from openenv_pipe.cli.streams import is_live
from openenv_pipe.config.secrets import shown_override
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sweeps import command
from openenv_pipe.extras.sweeps.folder import SweepFolder, find_newest_sweep
from openenv_pipe.runs.find import find_folder
from openenv_pipe.runs.places import runs_folders
from openenv_pipe.system.tables import Table
from openenv_pipe.system.untrusted_text import for_people


def multirun(
    overrides: list[str],
    resume: str | None,
    fork: str | None,
    runs_dir: Path | None,
    *,
    trust: bool,
) -> None:
    """Run or resume a sweep with the options of `train`, and print its table.

    Raises:
        ConfigError: the options do not go together.
        typer.Exit: a signal has ended the sweep, or a job has failed.
    """
    if fork:
        raise ConfigError("train -m takes no --fork; sweeps train new runs, or --resume SWEEP")
    progress = SweepTable()
    stopping = SweepSignals(progress.note)
    if resume:
        if resume == "latest":
            path = find_newest_sweep(runs_folders(runs_dir))
        else:
            path = find_folder(resume, runs_dir)
        if overrides:
            _reject_changes(path, overrides)
        result = command.resume(path, progress, stopping, trust=trust)
    else:
        words = with_runs_dir(overrides, runs_dir)
        result = command.sweep(words, command_line(), progress, stopping)
    print_table(result.table)
    for note in result.notes:
        notify_user(note)
    if stopping.received is not None:
        raise typer.Exit(128 + stopping.received)
    if not result.has_succeeded:
        raise typer.Exit(1)


def _reject_changes(path: Path, overrides: list[str]) -> NoReturn:
    """Raise ConfigError with the command of a new sweep that has the changes."""
    words = map(shlex.quote, SweepFolder.open(path).record.overrides)
    raise ConfigError(
        "a sweep that is resumed keeps its configuration, so "
        f"{shown_override(overrides[0])} cannot change it; leave that out, or start a new sweep "
        "with the change in these words: "
        f"openenv-pipe train -m {' '.join(words)}"
    )


class SweepTable:
    """The progress of a sweep: a live table of its jobs on a terminal, otherwise plain lines."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live: Live | None = None

    def note(self, text: str) -> None:
        if self._live is None:
            notify_user(text, self._stream)
        else:
            self._live.console.print(for_people(text), highlight=False)

    def job(self, line: str) -> None:
        if not is_live(self._stream):  # on a terminal the table shows it
            notify_user(line, self._stream)

    def table(self, make: Callable[[], Table]) -> None:
        if not is_live(self._stream):
            return
        if self._live is None:
            console = open_console(file=self._stream)
            self._live = Live(console=console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(Cleaned(make()), refresh=True)

    def end_table(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class SweepSignals:
    """Stops a sweep by `stop_signals`; a second signal kills its jobs on this machine."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.received: int | None = None  # the number of the first signal
        self._note = note

    @property
    def is_made(self) -> bool:
        return self.received is not None

    @contextmanager
    def accepting(self, stop: Callable[[], None], kill: Callable[[], None]) -> Iterator[None]:
        def receive(number: int, _: object) -> None:
            if self.is_made and number == signal.SIGHUP:
                return
            if self.is_made:
                kill()
                raise KeyboardInterrupt
            self.received = number
            stop()
            self._note("stopping the jobs, which save first; repeat to kill them")

        before = {number: signal.signal(number, receive) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
