"""Kills or disturbs runs, resumes them, and compares them with an uninterrupted run.

The tests and `benchmarks/crash.py` use this module. It sends signals only to processes that it
started.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from openenv_pipe.reports.runs_table import list_runs
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import without_times
from openenv_pipe.system.files import digest_of_file
from tests.commands import ENVIRONMENT, Command

LIMIT_S = 300.0
SMALL_DISK = "size=24m"  # less than the checkpoints of the runs take
LARGER_DISK = "size=200m"


def start(runs_dir: Path, *arguments: str) -> Command:
    """Start `openenv-pipe train` with its runs in a folder."""
    runs_dir.mkdir(exist_ok=True)
    return Command(runs_dir, "train", *arguments, f"runs_dir={runs_dir}")


def finish(command: Command) -> tuple[int, str]:
    """Wait for the process and return its exit code and stderr."""
    try:
        _, err = command.communicate(LIMIT_S)
    finally:
        command.kill()
    return command.wait(), err


@dataclass(frozen=True)
class Result:
    """What must be equal in two runs: `metrics` without times, and digests of all other files."""

    metrics: list[str]
    digests: dict[str, str]

    @classmethod
    def of(cls, folder: Path) -> "Result":
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        names = ("episodes", "eval", "images")
        inside = [*_checkpoints(folder), *(folder / name for name in names)]
        files = sorted(file for path in inside for file in path.rglob("*") if file.is_file())
        digests = {str(file.relative_to(folder)): digest_of_file(file) for file in files}
        return cls([without_times(line) for line in lines], digests)

    def difference(self, other: "Result") -> str | None:
        """Describe the first difference in words; empty if there is none."""
        for number, (mine, theirs) in enumerate(zip(self.metrics, other.metrics, strict=False)):
            if mine != theirs:
                return f"line {number + 1} of metrics.jsonl"
        if len(self.metrics) != len(other.metrics):
            return f"{len(self.metrics)} and {len(other.metrics)} lines of metrics.jsonl"
        for name in sorted({*self.digests, *other.digests}):
            if self.digests.get(name) != other.digests.get(name):
                return name
        return None


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "checkpoints").iterdir()) if not path.is_symlink()]


@dataclass
class Trial:
    """One run that is killed and resumed until it ends."""

    folder: Path
    kills: list[str] = field(default_factory=list)  # how far the run had come at each kill
    codes: list[int] = field(default_factory=list)  # of the processes that were not killed
    said: str = ""  # stderr of the last process


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run."""

    folder: Path
    duration_s: float
    num_lines: int  # of metrics.jsonl

    def draw_kills(self, seed: int, count: int) -> list[tuple[int, float]]:
        """Draw sorted instants for kills: a number of metrics lines, and a delay in seconds after
        it."""
        draw = random.Random(seed)
        gap_s = self.duration_s / (self.num_lines + 1)
        lines = sorted(draw.randrange(self.num_lines) for _ in range(count))
        return [(num_lines, draw.uniform(0.0, gap_s)) for num_lines in lines]


def killed_and_resumed(
    runs_dir: Path, arguments: Sequence[str], name: str, kills: Sequence[tuple[int, float]]
) -> Trial:
    """Start a run, kill and resume it once per instant, and let the last resume end.

    kills: sorted instants, each a number of metrics lines and a delay in seconds after it.

    An attempt is only killed after it has written to the run folder: before that nothing can be
    lost.
    """
    trial = Trial(runs_dir / name / "0001")
    for kill in [*kills, None]:
        resumed = trial.folder.exists()
        if resumed and RunFolder.open(trial.folder).status == "finished":
            break  # the process was killed while it wrote its report
        process = start(runs_dir, *(["--resume", str(trial.folder)] if resumed else arguments))
        if kill is None:
            code, trial.said = finish(process)
            trial.codes.append(code)
            break
        num_lines, delay_s = kill
        _wait_for_attempt(trial.folder, process, num_lines)
        try:
            trial.codes.append(process.wait(timeout=delay_s))
            break  # the process ended before the kill
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            trial.kills.append(where(trial.folder))
            assert "unreadable" not in [row.status for row in list_runs([runs_dir])]
    return trial


def interrupted_twice(runs_dir: Path, arguments: Sequence[str], name: str, num_lines: int) -> Trial:
    """Interrupt a run twice once it has written so many lines of metrics, and resume it."""
    trial, process = Trial(runs_dir / name / "0001"), start(runs_dir, *arguments)
    try:
        _wait_for_attempt(trial.folder, process, num_lines)
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)  # Two that come at once may arrive as one.
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
    finally:
        process.kill()
    trial.kills.append(where(trial.folder))
    resumed, trial.said = finish(start(runs_dir, "--resume", str(trial.folder)))
    trial.codes += [process.wait(), resumed]
    return trial


def resumed_twice_at_once(
    runs_dir: Path, arguments: Sequence[str], name: str, kill: tuple[int, float]
) -> Trial:
    """Kill a run, and let two processes resume it at the same time.

    The trial has the exit codes of both in ascending order, and what the rejected one said.
    """
    trial, process = Trial(runs_dir / name / "0001"), start(runs_dir, *arguments)
    num_lines, delay_s = kill
    try:
        _wait_for_attempt(trial.folder, process, num_lines)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=delay_s)
    finally:
        process.kill()
    process.wait()
    trial.kills.append(where(trial.folder))
    both = [start(runs_dir, "--resume", str(trial.folder)) for _ in range(2)]
    ends = sorted(finish(process) for process in both)
    trial.codes, trial.said = [code for code, _ in ends], ends[-1][1]
    return trial


def with_a_full_disk(disk: Path, arguments: Sequence[str], name: str) -> Trial:
    """Run until the small disk is full, make it larger, and resume the run."""
    trial = Trial(disk / name / "0001")
    code, trial.said = finish(start(disk, *arguments))
    trial.kills.append(where(trial.folder))
    make_larger(disk)
    resumed, _ = finish(start(disk, "--resume", str(trial.folder)))
    trial.codes = [code, resumed]
    return trial


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount a file system of a few megabytes at a new folder.

    Raises:
        PermissionError: This user may not mount one.
    """
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        raise PermissionError(path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def make_larger(disk: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,{LARGER_DISK}", str(disk)], check=True)


def _wait_for_attempt(
    folder: Path, process: Command | subprocess.Popen[str], num_lines: int = 0
) -> None:
    """Wait until the process has taken over the run folder and written so many lines, or has
    ended."""
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < deadline, f"{folder}: no attempt within {LIMIT_S} s"
        if folder.exists() and RunFolder.open(folder).record.process.pid == process.pid:
            metrics = folder / "metrics.jsonl"
            if num_lines == 0 or (metrics.exists() and lines_of(metrics) >= num_lines):
                return
        time.sleep(0.01)


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


def where(folder: Path) -> str:
    """Describe how far a killed run had come: its lines, checkpoints and half-written files."""
    if not folder.exists():
        return "no folder"
    metrics = folder / "metrics.jsonl"
    num_lines = lines_of(metrics) if metrics.exists() else 0
    half = sorted(path.name for path in (folder / "checkpoints").glob(".*"))
    checkpoints = [path.name for path in _checkpoints(folder) if not path.name.startswith(".")]
    last = checkpoints[-1] if checkpoints else "none"
    return f"{num_lines} lines, last checkpoint {last}{', ' + half[0] if half else ''}"


def uninterrupted(runs_dir: Path, arguments: Sequence[str], name: str) -> Reference:
    """Run without interruption, and measure the duration from the moment its folder exists.

    The run has an interpreter of its own, so that strings hash to other numbers than in the killed
    runs that are compared with it.
    """
    folder = runs_dir / name / "0001"
    runs_dir.mkdir(exist_ok=True)
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "openenv_pipe.cli.main",
            "train",
            *arguments,
            f"runs_dir={runs_dir}",
        ],
        cwd=runs_dir,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            _wait_for_attempt(folder, process)
            started = time.monotonic()
            _, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, err
    return Reference(folder, time.monotonic() - started, lines_of(folder / "metrics.jsonl"))
