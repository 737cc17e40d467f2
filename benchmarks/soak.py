"""Train for thousands of steps, and check that what the run takes of its machine stays the same.

    PYTHONPATH=. python benchmarks/soak.py [--conf echo] [--steps 3000] [--every 100]
        [--flat-from 100] [--output FILE] [KEY=VALUE ...]

The run is a process of its own. Twice a second its whole process tree is measured; a row of the
table is the median of the last measurements before a step:

    rss, pss     MB of memory: of all processes, and with shared pages counted once
    threads, descriptors, processes
    shm          MB of shared memory (files in /dev/shm) that a process maps or has open
    temporary    files in the run's own folder for temporary files

A quantity is flat if no later row is more than 5% above the row of the step --flat-from. Counts
may also exceed it by 2, because connections and files may be open for a moment. pss is shown and
not judged: it rises when another program that uses the same libraries ends.

The results are written to benchmarks/results/soak_CONF.json, or to FILE. Ctrl-C ends the run early;
the table then has the steps so far. The exit code is 1 if something is not flat, or if the run
fails. `steps_that_trained` in the results says in how many steps the weights changed: a run whose
episodes all earn the same measures only sampling.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import psutil

RESULTS = Path(__file__).with_name("results")
POLL_S = 0.5
NUM_POLLS = 21  # of which a row is the median
MAX_GROWTH = 0.05
MAX_MORE = 2  # of what is counted
STOP_LIMIT_S = 60.0
MEMORY = ("rss_mb", "shm_mb")
JUDGED = (*MEMORY, "threads", "descriptors", "processes", "temporary")


@dataclass(frozen=True)
class Usage:
    """What a run takes of its machine."""

    rss_mb: float
    pss_mb: float
    shm_mb: float
    threads: float
    descriptors: float
    processes: float
    temporary: float

    @classmethod
    def of(cls, root: psutil.Process, temporary: Path) -> "Usage":
        """Measure a process and its descendants. Those that end meanwhile do not count."""
        rss = pss = threads = descriptors = processes = 0
        shared: dict[int, int] = {}  # bytes by inode
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                memory = process.memory_full_info()
                rss, pss = rss + memory.rss, pss + memory.pss
                threads += process.num_threads()
                descriptors += process.num_fds()
                shared |= dict(shared_memory(process.pid))
                processes += 1
        return cls(
            rss_mb=rss / 2**20,
            pss_mb=pss / 2**20,
            shm_mb=sum(shared.values()) / 2**20,
            threads=threads,
            descriptors=descriptors,
            processes=processes,
            temporary=sum(1 for each in temporary.rglob("*") if not each.is_dir()),
        )

    @classmethod
    def median(cls, measured: "deque[Usage]") -> "Usage":
        names = [field.name for field in fields(cls)]
        return cls(*(statistics.median(getattr(each, name) for each in measured) for name in names))


def shared_memory(pid: int) -> Iterator[tuple[int, int]]:
    """List inode and bytes of the files in /dev/shm that a process maps or has open."""
    for folder in ("fd", "map_files"):
        with suppress(PermissionError):  # map_files needs privileges on some systems
            for link in Path(f"/proc/{pid}/{folder}").iterdir():
                with suppress(FileNotFoundError):
                    if str(link.readlink()).startswith("/dev/shm/"):
                        status = link.stat()
                        yield status.st_ino, status.st_blocks * 512


class Run:
    """A training run in a process of its own, with folders of its own."""

    def __init__(self, conf: str, num_steps: int, overrides: list[str], base: Path) -> None:
        self.temporary = base / "tmp"
        self.temporary.mkdir()
        self._lines = base / "runs" / conf / "0001" / "metrics.jsonl"
        self._read = 0
        self.log = base / "log"
        self.overrides = [
            f"conf={conf}",
            f"trainer.steps={num_steps}",
            *overrides,
        ]
        command = [sys.executable, "-m", "openenv_pipe.cli.main", "train", *self.overrides]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"name={conf}", f"runs_dir={base / 'runs'}"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(self.temporary)},
                start_new_session=True,
            )
        self._root = psutil.Process(self._process.pid)
        self.step = 0
        self.num_trained = 0  # steps that changed the weights

    def usage(self) -> Usage:
        return Usage.of(self._root, self.temporary)

    def poll(self) -> int | None:
        """Note the last finished step; return the exit code, or None while the run goes on."""
        with suppress(FileNotFoundError), self._lines.open("rb") as lines:
            lines.seek(self._read)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                record = json.loads(line)
                if record["stage"] == "grpo":
                    self.step = record["step"]
                    self.num_trained += record.get("groups/trained", 0) > 0
        return self._process.poll()

    def stop(self) -> None:
        """End the run as Ctrl-C does, or by force if that takes too long."""
        for end in (self._process.terminate, self._process.kill):
            with suppress(subprocess.TimeoutExpired):
                end()
                self._process.wait(STOP_LIMIT_S)
                return


def soak(run: Run, num_steps: int, every: int) -> tuple[dict[int, Usage], int | None]:
    """Measure until the run ends; return its rows by step, and its exit code (None: Ctrl-C)."""
    rows: dict[int, Usage] = {}
    measured: deque[Usage] = deque(maxlen=NUM_POLLS)
    wanted = every
    print(titles(), flush=True)
    try:
        while (code := run.poll()) is None:
            if run.step < num_steps:  # afterwards the run evaluates and ends
                with suppress(psutil.NoSuchProcess):
                    measured.append(run.usage())
            if run.step >= wanted:
                rows[wanted] = Usage.median(measured)
                print(row(wanted, rows[wanted]), flush=True)
                wanted = (run.step // every + 1) * every
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        run.stop()
        return rows, None
    return rows, code


def titles() -> str:
    return " ".join(["  step", *(f"{field.name:>11}" for field in fields(Usage))])


def row(step: int, usage: Usage) -> str:
    return " ".join([f"{step:6}", *(f"{value:11.0f}" for value in asdict(usage).values())])


def grown(rows: dict[int, Usage], flat_from: int) -> dict[str, str]:
    """Say of each quantity that is not flat how far it rose, and at which step."""
    later = {step: usage for step, usage in rows.items() if step > flat_from}
    found = {}
    for name in JUDGED:
        first = getattr(rows[flat_from], name)
        step, most = max(
            ((step, getattr(usage, name)) for step, usage in later.items()),
            key=lambda pair: pair[1],
        )
        more = 1.0 if name in MEMORY else MAX_MORE
        if most > max(first * (1 + MAX_GROWTH), first + more):
            found[name] = f"{first:.0f} at step {flat_from}, {most:.0f} at step {step}"
    return found


def report(run: Run, rows: dict[int, Usage], code: int | None, flat_from: int) -> dict:
    """Put the results together, with the verdict, and print it."""
    enough = flat_from in rows and max(rows) > flat_from
    not_flat = grown(rows, flat_from) if enough else {}
    if code:
        verdict = f"the run failed with exit code {code}: {run.log.read_text()[-2000:]}"
    elif not enough:
        verdict = f"no verdict: {max(rows, default=0)} steps, flatness counts from {flat_from}"
    elif not_flat:
        verdict = "not flat: " + "; ".join(f"{name} {what}" for name, what in not_flat.items())
    else:
        verdict = f"flat within {MAX_GROWTH:.0%} from step {flat_from} to step {max(rows)}"
    print(verdict, flush=True)
    return {
        "benchmark": "soak",
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M}Z",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "run": run.overrides,
        "steps": run.step,
        "steps_that_trained": run.num_trained,
        "ended_early": code is None,
        "verdict": verdict,
        "flat": enough and not not_flat and not code,
        "rows": {str(step): asdict(usage) for step, usage in rows.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conf", default="echo")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=100, help="steps between two rows")
    parser.add_argument("--flat-from", type=int, default=100)
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        run = Run(given.conf, given.steps, given.overrides, Path(base))
        try:
            rows, code = soak(run, given.steps, given.every)
        finally:
            run.stop()
        results = report(run, rows, code, given.flat_from)
    output = given.output or RESULTS / f"soak_{given.conf}.json"
    output.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    return 0 if results["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
