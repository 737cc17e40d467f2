"""Measure how long a run takes to begin, in this checkout and in another one, in alternation.

    git worktree add /tmp/before COMMIT
    python benchmarks/start.py --before /tmp/before [--rounds 5] [--sweep]

Each round starts `openenv-pipe train conf=wordle` once from each checkout, and stops it by SIGINT
after its first training step. With --sweep it starts a sweep of two short jobs, and measures the
second one, from the last line that the first one prints. Prints the medians of the seconds until
components were ready (model loaded, servers answering) and until the first step, their ratios, and
the processor seconds of the run's own process until then. The seconds need an idle machine.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

HERE = Path(__file__).parents[1]
MARKS = {"ready": "playing the baselines", "first step": "warm_start 1/"}
END = "report: "  # the last line of a run
OVERRIDES = ("conf=wordle", "eval.num_tasks=8", "eval.samples_per_task=1")
RUN = ("trainer.warm_start.source.num_episodes=256",)
SWEEP = (
    *("-m", "seed=0,1", "trainer.steps=1", "trainer.warm_start.source.num_episodes=64"),
    *("trainer.tasks_per_step=1", "trainer.warm_start.steps=1"),
)
LIMIT_S = 300.0
POLL_S = 0.002
Times = tuple[float, float]  # seconds, and processor seconds of the run's process


def start_once(checkout: Path, *, is_sweep: bool) -> dict[str, Times]:
    """Return the times until each mark is printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = folder / "output"
        overrides = (*OVERRIDES, *(SWEEP if is_sweep else RUN))
        with output.open("wb") as file:
            started = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "openenv_pipe.cli.main", "train", *overrides],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(checkout)},
                stdout=file,
                stderr=file,
            )
        try:
            spent_s, number = 0.0, 2 if is_sweep else 1
            if is_sweep:
                started = when(folder, "runs/sweeps/*/jobs/0000.log", END)
                spent_s = processor_s(folder, 1)
                output = next(folder.glob("runs/sweeps/*/jobs")) / "0001.log"
            return {
                mark: (
                    when(folder, str(output.relative_to(folder)), words) - started,
                    processor_s(folder, number)
                    - (spent_s if is_sweep and is_same(folder) else 0.0),
                )
                for mark, words in MARKS.items()
            }
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)


def when(folder: Path, pattern: str, words: str) -> float:
    """Wait until a file contains the words, and return the time."""
    deadline = time.monotonic() + LIMIT_S
    while not any(words in path.read_text() for path in folder.glob(pattern)):
        if time.monotonic() > deadline or "error: " in (folder / "output").read_text():
            raise SystemExit(f"{words!r} never appeared in {pattern}")
        time.sleep(POLL_S)
    return time.monotonic()


def processor_s(folder: Path, number: int) -> float:
    """Return the processor seconds that the process of a run has taken; 0 if it is gone."""
    try:
        times = psutil.Process(pid_of(folder, number)).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def is_same(folder: Path) -> bool:
    """True if one process has run both runs of a sweep, one after the other."""
    return pid_of(folder, 1) == pid_of(folder, 2)


def pid_of(folder: Path, number: int) -> int:
    return int(
        json.loads((folder / f"runs/wordle/{number:04d}/run.json").read_text())["process"]["pid"]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before.absolute(), "now": HERE}
    rounds = [
        {name: start_once(path, is_sweep=arguments.sweep) for name, path in checkouts.items()}
        for _ in range(arguments.rounds)
    ]
    print("| until | before, s | now, s | now / before in each round | processor s before | now |")
    print("|---|---|---|---|---|---|")
    for mark in MARKS:
        before, now = ([each[name][mark] for each in rounds] for name in checkouts)
        ratios = ", ".join(f"{b[0] / a[0]:.2f}" for a, b in zip(before, now, strict=True))
        seconds, processor = (
            [median(times[part] for times in each) for each in (before, now)] for part in range(2)
        )
        print(
            f"| {mark} | {seconds[0]:.1f} | {seconds[1]:.1f} | {ratios} "
            f"| {processor[0]:.1f} | {processor[1]:.1f} |"
        )


if __name__ == "__main__":
    main()
