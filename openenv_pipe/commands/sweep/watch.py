"""How the jobs of a sweep do: a line for each, and sweep.json kept up to date while they run.

Looks at folders only, so it sees jobs in other processes and on other machines alike. Computes
nothing: numbers are those of a run's last record.
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from openenv_pipe.commands.sweep.folder import Job, SweepFolder
from openenv_pipe.reports.runs_table import STATUS_STYLES
from openenv_pipe.runs.metrics import read_metrics

LOOK_EVERY_S = 0.5
TELL_EVERY_S = 15.0  # of a running job, where lines cannot change in place
NUMBERS = {"reward": "reward/mean", "success": "success/rate", "loss": "loss/supervised"}
STYLES = {**STATUS_STYLES, "waiting": "dim", "pruned": "yellow"}


class Judge(Protocol):
    """Told of each record of the jobs that run."""

    def see(self, job: Job, records: Sequence[Mapping[str, Any]]) -> None:
        """All records of a job's run so far, each time there are more of them."""


class Watch:
    """The jobs of one sweep, seen by people and by the judge of a search."""

    def __init__(
        self, folder: SweepFolder, judge: Judge | None = None, stream: TextIO | None = None
    ) -> None:
        self._folder = folder
        self._judge = judge
        stream = stream or sys.stderr
        self._stream = stream
        self._console = Console(file=stream, soft_wrap=not stream.isatty())
        self._told: dict[int, tuple[str, float]] = {}  # by job: the line, and when it was told
        self._seen: dict[int, tuple[str, int]] = {}  # by job: its run, and the metrics' size
        self._last: dict[int, Mapping[str, Any]] = {}  # record, by job
        self._live: Live | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look now and then while the block runs, and once more at its end.

        Inside the block the sweep's record belongs to the watch.
        """
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.look()

    def look(self) -> None:
        """See what has changed, tell it and write it down."""
        before = list(self._folder.record.jobs)
        for job in before:
            self._follow(self._folder.refresh(job.index))
        if self._folder.record.jobs != before:
            self._folder.write()
        if self._live is not None:
            self._live.update(self.table())

    def table(self) -> Table:
        """A row for each job, with what it has of its own."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("job", "status", "run", "overrides", "last step"):
            table.add_column(title, no_wrap=True)
        table.add_column("", style="dim")  # the one that gives way on a narrow terminal
        for job in self._folder.record.jobs:
            table.add_row(
                str(job.index),
                Text(job.status, STYLES[job.status]),
                job.run or "",
                Text(self.own_overrides(job)),
                self._progress(job),
                Text(_shown_cause(job), no_wrap=True, overflow="ellipsis"),
            )
        return table

    def _watch(self, over: threading.Event) -> None:
        if not self._stream.isatty():
            while not over.wait(LOOK_EVERY_S):
                self.look()
            return
        with Live(console=self._console, transient=True, auto_refresh=False) as self._live:
            while not over.wait(LOOK_EVERY_S):
                self.look()
                self._live.refresh()
        self._live = None

    def _follow(self, job: Job) -> None:
        """Read what a job has done since it was looked at, and tell it where that is due."""
        run = self._folder.run_folder(job.index)
        if run is not None:
            metrics = run.metrics_path
            seen = (run.record.id, metrics.stat().st_size if metrics.exists() else 0)
            if seen != self._seen.get(job.index):
                self._seen[job.index] = seen
                records = read_metrics(run.metrics_path)
                self._last[job.index] = records[-1] if records else {}
                if self._judge is not None:
                    self._judge.see(job, records)
        line, told_s = self._told.get(job.index, (f"job {job.index} waiting", 0.0))
        due = time.monotonic() - told_s > TELL_EVERY_S or job.status != "running"
        told, line = line, self._line(job)
        if due and line != told and job.status != "waiting":
            self._told[job.index] = (line, time.monotonic())
            if not self._stream.isatty():  # there the table says it
                self._console.print(line, markup=False, highlight=False)

    def _line(self, job: Job) -> str:
        words = [f"job {job.index}", job.status, job.run or ""]
        if job.status != "waiting":
            words += [self._progress(job), self.own_overrides(job)]
        cause = _shown_cause(job)
        return " ".join(filter(None, words)) + (f": {cause}" if cause else "")

    def _progress(self, job: Job) -> str:
        record = self._last.get(job.index, {})
        numbers = [f"{name} {record[key]:.3f}" for name, key in NUMBERS.items() if key in record]
        return " ".join([record["stage"], str(record["step"]), *numbers]) if record else ""

    def own_overrides(self, job: Job) -> str:
        """Those that not all jobs have, by the last part of their keys."""
        own = [each for each in job.overrides if each not in self._folder.record.overrides]
        return " ".join(_short(override) for override in own)


def _shown_cause(job: Job) -> str:
    """Its first sentence, where that says more than the status."""
    first, _, rest = (job.cause or "").partition("\n")
    if first.endswith(":"):
        first = f"{first} {rest.partition(chr(10))[0].strip()}"
    return "" if first == job.status else first


def _short(override: str) -> str:
    """`lr=0.0001568` of `trainer.optimizer.lr=0.00015676677195506063`."""
    key, _, value = override.partition("=")
    with suppress(ValueError):
        value = f"{float(value):.4g}"
    return f"{key.rpartition('.')[2]}={value}"
