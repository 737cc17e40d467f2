"""Runs that are killed at random instants and resumed, held against one that nobody touched.

For the tests and for `benchmarks/crash.py`. Kills with SIGKILL, and ends only what it started.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openenv_pipe.reports.runs_table import list_runs
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import without_times
from openenv_pipe.system.files import digest_of_file, digest_of_folder
from tests.commands import ENVIRONMENT, Command

LIMIT_S = 300.0


def start(runs_dir: Path, *arguments: str) -> Command:
    """`openenv-pipe train` with its runs in a folder."""
    runs_dir.mkdir(exist_ok=True)
    return Command(runs_dir, "train", *arguments, f"runs_dir={runs_dir}")


def finish(command: Command) -> tuple[int, str]:
    """Exit code and stderr."""
    try:
        _, err = command.communicate(LIMIT_S)
    finally:
        command.kill()
    return command.wait(), err


@dataclass(frozen=True)
class Result:
    """What two equal runs have in common: `metrics` without times, and all else by its digest."""

    metrics: list[str]
    digests: dict[str, str]

    @classmethod
    def of(cls, folder: Path) -> "Result":
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        digests = {path.name: digest_of_folder(path) for path in _checkpoints(folder)}
        for kind in ("episodes", "eval"):
            for path in sorted((folder / kind).iterdir()):
                digests[f"{kind}/{path.name}"] = digest_of_file(path)
        return cls([without_times(line) for line in lines], digests)

    def difference(self, other: "Result") -> str | None:
        """The first thing that differs, in words."""
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
    """One run, killed and resumed until it ends."""

    folder: Path
    kills: list[str] = field(default_factory=list)  # how far it had come each time
    codes: list[int] = field(default_factory=list)
    said: str = ""  # at its end


@dataclass(frozen=True)
class Reference:
    """The run that nobody touches."""

    folder: Path
    duration_s: float
    num_lines: int  # of its metrics

    def draw_kills(self, seed: int, count: int) -> list[tuple[int, float]]:
        """Random instants in the order of a run: so many lines of metrics, and then some time."""
        draw = random.Random(seed)
        gap_s = self.duration_s / (self.num_lines + 1)
        lines = sorted(draw.randrange(self.num_lines) for _ in range(count))
        return [(num_lines, draw.uniform(0.0, gap_s)) for num_lines in lines]


def killed_and_resumed(
    runs_dir: Path, arguments: Sequence[str], name: str, kills: Sequence[tuple[int, float]]
) -> Trial:
    """Starts a run and kills it, resumes and kills it, ...; the last resume is left to end.

    kills: so many lines of metrics, and so many seconds after that, in the order of a run.

    An attempt is killed once it is in its folder: before that there is nothing to lose.
    """
    trial = Trial(runs_dir / name / "0001")
    for kill in [*kills, None]:
        resumed = trial.folder.exists()
        if resumed and RunFolder.open(trial.folder).status == "finished":
            break  # killed while it wrote its report
        process = start(runs_dir, *(["--resume", str(trial.folder)] if resumed else arguments))
        if kill is None:
            code, trial.said = finish(process)
            trial.codes.append(code)
            break
        num_lines, delay_s = kill
        _wait_for_attempt(trial.folder, process, num_lines)
        try:
            trial.codes.append(process.wait(timeout=delay_s))
            break  # it was faster than the kill
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            trial.kills.append(where(trial.folder))
            assert "unreadable" not in [row.status for row in list_runs(runs_dir)]
    return trial


def _wait_for_attempt(
    folder: Path, process: Command | subprocess.Popen[str], num_lines: int = 0
) -> None:
    """Until the process has made the run its own and has written so many lines, or has ended."""
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
    """How far a killed run had come: its lines, its checkpoints, what was half written."""
    if not folder.exists():
        return "no folder"
    metrics = folder / "metrics.jsonl"
    num_lines = lines_of(metrics) if metrics.exists() else 0
    half = sorted(path.name for path in (folder / "checkpoints").glob(".*"))
    checkpoints = [path.name for path in _checkpoints(folder) if not path.name.startswith(".")]
    last = checkpoints[-1] if checkpoints else "none"
    return f"{num_lines} lines, last checkpoint {last}{', ' + half[0] if half else ''}"


def untouched(runs_dir: Path, arguments: Sequence[str], name: str) -> Reference:
    """Runs to its end, timed from when it has a folder.

    In an interpreter of its own: strings hash to other numbers than in the runs held against it.
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
