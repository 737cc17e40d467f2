"""Report the progress of a sweep's jobs, and keep sweep.json up to date while they run.

It reads only folders, so jobs in other processes and on other machines are reported alike. Numbers
are those of a run's last record.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.text import Text

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.sweeps.folder import Job, SweepFolder
from openenv_pipe.reports.runs_table import STATUS_STYLES
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.tables import Column, Fit, Table

if TYPE_CHECKING:
    from openenv_pipe.extras.sweeps.cli import SweepTable
    from openenv_pipe.extras.sweeps.search import Search

LOOK_EVERY_S = 0.5
TELL_EVERY_S = 15.0  # between lines about a running job
NUMBERS = {"reward": "reward/mean", "success": "success/rate", "loss": "loss/supervised"}
STYLES = {**STATUS_STYLES, "waiting": "dim", "pruned": "yellow"}


class Watch:
    """Reads the progress of a sweep's jobs, for people and for the judge of a search."""

    def __init__(
        self, folder: SweepFolder, progress: "SweepTable", judge: "Search | None" = None
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._judge = judge
        self._told: dict[int, tuple[str, float]] = {}  # job -> last line, and when it was reported
        self._seen: dict[int, tuple[str, int]] = {}  # job -> its run, and the metrics' size
        self._last: dict[int, Mapping[str, Any]] = {}  # job -> last record

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check the jobs regularly while the block runs, and once more at its end.

        Inside the block, only the watch writes the sweep's record.
        """
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._progress.end_table()
            self.look()

    def look(self) -> None:
        """Find what has changed, report it and write it to sweep.json."""
        before = list(self._folder.record.jobs)
        for job in before:
            self._follow(self._folder.refresh(job.index))
        if self._folder.record.jobs != before:
            self._folder.write()

    def table(self) -> Table:
        table = Table(
            Column("job"),
            Column("status"),
            Column("run", drop=2),
            Column("overrides", fit=Fit.FOLD),
            Column("last step", drop=1),
            Column("", drop=3, fit=Fit.CUT, style="dim"),
        )
        for job in self._folder.record.jobs:
            table.add_row(
                str(job.index),
                Text(job.status, STYLES[job.status]),
                job.run or "",
                self.own_overrides(job),
                self._numbers(job),
                _shown_cause(job),
            )
        return table

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(LOOK_EVERY_S):
            self.look()
            self._progress.table(self.table)

    def _follow(self, job: Job) -> None:
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
            self._progress.job(line)

    def _line(self, job: Job) -> str:
        words = [f"job {job.index}", job.status, job.run or ""]
        if job.status != "waiting":
            words += [self._numbers(job), self.own_overrides(job)]
        cause = _shown_cause(job)
        return " ".join(filter(None, words)) + (f": {cause}" if cause else "")

    def _numbers(self, job: Job) -> str:
        if job.index not in self._last:  # It ended before this process began.
            with suppress(RunFolderError):  # Its run may have been removed since.
                run = self._folder.run_folder(job.index)
                records = [] if run is None else read_metrics(run.metrics_path)
                self._last[job.index] = records[-1] if records else {}
        record = self._last.get(job.index, {})
        numbers = [f"{name} {record[key]:.3f}" for name, key in NUMBERS.items() if key in record]
        return " ".join([record["stage"], str(record["step"]), *numbers]) if record else ""

    def own_overrides(self, job: Job) -> str:
        """Return the overrides that not all jobs have, by the last part of their keys."""
        own = [each for each in job.overrides if each not in self._folder.record.overrides]
        return " ".join(_short(override) for override in own)


def _shown_cause(job: Job) -> str:
    """Return the cause's first sentence if it says more than the status."""
    first, _, rest = (job.cause or "").partition("\n")
    if first.endswith(":"):
        first = f"{first} {rest.partition(chr(10))[0].strip()}"
    return "" if first == job.status else first


def _short(override: str) -> str:
    """Shorten `trainer.optimizer.lr=0.00015676677195506063` to `lr=0.0001568`."""
    key, _, value = override.partition("=")
    with suppress(ValueError):
        value = f"{float(value):.4g}"
    return f"{key.rpartition('.')[2]}={value}"
