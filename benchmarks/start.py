"""Measure how long a run takes to begin, in this checkout and in another one, in alternation.

    git worktree add /tmp/before COMMIT
    python benchmarks/start.py --before /tmp/before [--rounds 5]

Each round starts `openenv-pipe train conf=wordle` once from each checkout, and stops it by SIGINT
after its first training step. Prints the medians of the seconds until components were ready (model
loaded, servers answering) and until the first step, and their ratios. Both need an idle machine.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[1]
MARKS = {"ready": "playing the baselines", "first step": "warm_start 1/"}
OVERRIDES = (
    *("conf=wordle", "trainer.warm_start.num_episodes=256", "eval.num_tasks=8"),
    "eval.samples_per_task=1",
)
LIMIT_S = 300.0


def start_once(checkout: Path) -> dict[str, float]:
    """Return the seconds until each mark is printed."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "openenv_pipe.cli.main", "train", *OVERRIDES],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            for name, words in MARKS.items():
                if words in line and name not in found:
                    found[name] = time.monotonic() - started
            if len(found) == len(MARKS):
                process.send_signal(signal.SIGINT)
                break
        process.stderr.read()
        process.wait(LIMIT_S)
    if len(found) < len(MARKS):
        raise SystemExit(f"a run of {checkout} ended before its first step")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before.absolute(), "now": HERE}
    rounds = [
        {name: start_once(path) for name, path in checkouts.items()}
        for _ in range(arguments.rounds)
    ]
    print("| until | before, s | now, s | now / before in each round |")
    print("|---|---|---|---|")
    for mark in MARKS:
        before, now = ([each[name][mark] for each in rounds] for name in checkouts)
        ratios = ", ".join(f"{b / a:.2f}" for a, b in zip(before, now, strict=True))
        print(f"| {mark} | {median(before):.1f} | {median(now):.1f} | {ratios} |")


if __name__ == "__main__":
    main()
