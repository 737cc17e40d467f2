"""Kill and disturb short runs, resume them, and compare them with an undisturbed run.

A run passes if its metrics (without `time/*`), episodes, evaluations and every file of every
checkpoint equal those of the undisturbed run byte for byte in the end, and if no process and no
temporary file is left. It uses every kind of state: see RUN in tests/integration/test_resume.py.
These are tried:

    kills           SIGKILL at a random line of the metrics and a random moment after it, several
                    times in a run, which is resumed each time
    program kills   the same with a program that has sub-agents: see
                    tests/integration/test_program_train.py
    others          three more, this many times each:
                    SIGINT until the run ends, which the second one does; then it is resumed
                    a disk of 24 MB becomes full; the run is resumed once the disk is larger
                    a killed run is resumed by two processes at once, one of which is rejected

The table is written to benchmarks/results/crash.md, or to FILE. The exit code is 1 if a run does
not pass. The full disk needs the right to mount a file system.

    PYTHONPATH=. python benchmarks/crash.py [--kills 21] [--program-kills 4] [--others 2]
        [--kills-per-run 4] [--first-seed 0] [--output FILE]

Processes are forked from one that has already imported torch, because that import takes most of
the time of a short run. Real processes are killed and resumed all the same.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.commands import servers_of
from tests.crash_matrix import (
    Reference,
    Result,
    Trial,
    interrupted_twice,
    killed_and_resumed,
    resumed_twice_at_once,
    small_disk,
    uninterrupted,
    with_a_full_disk,
)
from tests.integration import test_program_train, test_resume

PAGE = Path(__file__).with_name("results") / "crash.md"
LEFT_LIMIT_S = 30.0  # for guardians to end the servers of a killed run


@dataclass
class Subject:
    """A run to disturb, and what it leads to undisturbed."""

    arguments: Sequence[str]
    name: str
    base: Path  # of all runs, and of their temporary files
    reference: Reference
    expected: Result

    @classmethod
    def of(cls, arguments: Sequence[str], name: str, base: Path) -> "Subject":
        reference = uninterrupted(base / f"undisturbed_{name}", arguments, name)
        return cls(arguments, name, base, reference, Result.of(reference.folder))


@dataclass
class Row:
    """How the runs ended that were disturbed in one way."""

    what: str
    num_events: int = 0
    num_runs: int = 0
    num_same: int = 0  # runs that ended with the same bytes
    left: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def add(self, trial: Trial, codes: list[int], subject: Subject) -> None:
        """Note a trial. codes: the exit codes that its processes must have had."""
        difference = Result.of(trial.folder).difference(subject.expected)
        self.num_events += len(trial.kills)
        self.num_runs += 1
        self.num_same += difference is None
        if difference:
            self.failures.append(difference)
        if trial.codes != codes:
            self.failures.append(f"exit codes {trial.codes}, not {codes}: {trial.said[-500:]}")
        self.left |= left_in(subject.base)
        print(f"{self.what}: {trial.kills} -> {difference or 'the same'}", flush=True)

    @property
    def text(self) -> str:
        left = ", ".join(sorted(self.left)) or "nothing"
        return f"| {self.what} | {self.num_events} | {self.num_runs} | {self.num_same} | {left} |"


def left_in(base: Path) -> set[str]:
    """Find the processes and temporary files of the runs that do not vanish in time."""
    deadline = time.monotonic() + LEFT_LIMIT_S
    while True:
        found = {f"process {process.pid}" for process in servers_of(base)}
        found |= {str(path.relative_to(base)) for path in (base / "tmp").iterdir()}
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def killed(what: str, num_kills: int, given: argparse.Namespace, subject: Subject) -> Row:
    """Kill and resume runs until the given number of kills is reached."""
    row, seed = Row(what), given.first_seed
    while row.num_events < num_kills:
        count = min(given.kills_per_run, num_kills - row.num_events)
        folder = subject.base / f"killed_{subject.name}_{seed}"
        kills = subject.reference.draw_kills(seed, count)
        trial = killed_and_resumed(folder, subject.arguments, subject.name, kills)
        row.add(trial, [0] * len(trial.codes), subject)
        seed += 1
    return row


def disturbed_otherwise(given: argparse.Namespace, subject: Subject) -> Iterator[Row]:
    """Interrupt runs twice, fill their disks, and resume them twice at once."""
    run = (subject.arguments, subject.name)
    interrupted, full, doubled = (
        Row("SIGINT twice"),
        Row("full disk"),
        Row("SIGKILL, then two resumers at once"),
    )
    for number in range(given.first_seed, given.first_seed + given.others):
        ((num_lines, delay_s),) = subject.reference.draw_kills(number, 1)
        folder = subject.base / f"interrupted_{number}"
        interrupted.add(interrupted_twice(folder, *run, num_lines), [130, 0], subject)
        with small_disk(subject.base / f"disk_{number}") as disk:
            full.add(with_a_full_disk(disk, *run), [1, 0], subject)
        folder = subject.base / f"doubled_{number}"
        trial = resumed_twice_at_once(folder, *run, (num_lines, delay_s))
        doubled.add(trial, [0, 2], subject)
    yield from (interrupted, full, doubled)


def measure(given: argparse.Namespace, base: Path) -> Iterator[Row]:
    subject = Subject.of(test_resume.RUN, "smoke", base)
    yield killed("SIGKILL", given.kills, given, subject)
    if given.program_kills:
        arguments = test_program_train.arguments(base / "agent.py")
        program = Subject.of(arguments, "echo", base)
        yield killed("SIGKILL, program with sub-agents", given.program_kills, given, program)
    yield from disturbed_otherwise(given, subject)


def page(rows: Sequence[Row]) -> str:
    """Write the results as a Markdown page."""
    failures = [f"- {row.what}: {failure}" for row in rows for failure in row.failures]
    lines = [
        "# Runs that are killed or disturbed, and resumed",
        "",
        f"    PYTHONPATH=. python benchmarks/crash.py {' '.join(sys.argv[1:])}".rstrip(),
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} CPUs, torch {version('torch')}. Nothing here is timed.",
        "",
        "A run is the same if its metrics without `time/*`, every episode, every evaluation and "
        "every file\nof every checkpoint equal those of the run that was not disturbed, byte for "
        "byte.",
        "",
        "| disturbed by | times | runs | the same | processes and temporary files left |",
        "|---|---|---|---|---|",
        *(row.text for row in rows),
        "",
        *(failures or ["All exit codes were as documented."]),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=21)
    parser.add_argument("--program-kills", type=int, default=4)
    parser.add_argument("--others", type=int, default=2)
    parser.add_argument("--kills-per-run", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=PAGE)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        temporary = Path(base, "tmp")
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)  # of the runs
        rows = list(measure(given, Path(base)))
    given.output.write_text(page(rows))
    print(given.output.read_text(), end="")
    return int(any(row.failures or row.left for row in rows))


if __name__ == "__main__":
    sys.exit(main())
