"""Measure episodes per second by `trainer.max_staleness`.

    python benchmarks/asynchrony.py [--rounds 3] [--steps 12] [--step-s 0.05] [OVERRIDES]

Trains on an environment whose steps take 50 ms, with trainer.max_staleness 0 and 1 in turn, each
in its own process, so that a change of the machine's load affects both. A run's figure leaves out
its first two steps; a row's figure is the median of the rounds. OVERRIDES, such as `engine=vllm`,
are added to both. Prints a table in Markdown.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from openenv_pipe.runs.metrics import read_metrics

ROOT = Path(__file__).parents[1]
LEFT_OUT = 2  # steps until caches are warm and groups are played ahead
LIMIT_S = 900.0


def measure(staleness: int, folder: Path, steps: int, step_s: float, overrides: list[str]) -> dict:
    """Return one run's episodes per second, largest staleness, and times of the parts of a step."""
    server = f"{sys.executable},{ROOT / 'benchmarks' / 'slow_echo.py'},'{{port}}','{step_s}'"
    subprocess.run(
        [
            *(sys.executable, "-m", "openenv_pipe.cli.main", "train", "conf=echo"),
            f"env.command=[{server}]",
            *(f"runs_dir={folder}", f"trainer.steps={steps}", "eval.num_tasks=1"),
            *("num_threads=1", "host.sessions_per_server=64", "eval.baselines=false"),
            *(f"trainer.max_staleness={staleness}", "trainer.checkpoint.every=1000"),
            *overrides,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=True,
    )
    records = read_metrics(next(folder.glob("echo/[0-9]*/metrics.jsonl")))[LEFT_OUT:]
    seconds = sum(record["time/step_s"] for record in records)
    return {
        "episodes_per_s": sum(record["episodes/count"] for record in records) / seconds,
        "staleness": max(record["staleness/max"] for record in records),
        "rollout": sum(record["time/rollout_s"] for record in records) / seconds,
        "learner": sum(record["time/learner_s"] for record in records) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    found: dict[int, list[dict]] = {0: [], 1: []}
    for number in range(asked.rounds):
        for staleness, results in found.items():
            with tempfile.TemporaryDirectory() as folder:
                result = measure(
                    staleness, Path(folder), asked.steps, asked.step_s, asked.overrides
                )
            results.append(result)
            print(f"round {number + 1}, max_staleness={staleness}: {result}", file=sys.stderr)
    print_table(found, asked)


def print_table(found: dict[int, list[dict]], asked: argparse.Namespace) -> None:
    how = " ".join(asked.overrides) or "engine=local"
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f}; {asked.rounds} rounds of {asked.steps} steps, "
        f"{1000 * asked.step_s:g} ms a step of the environment, {how}\n"
    )
    print("| max_staleness | episodes/s | waits for episodes | learns | largest staleness |")
    print("|---|---|---|---|---|")
    base = median(result["episodes_per_s"] for result in found[0])
    for staleness, results in found.items():
        speed, rollout, learner = (
            median(result[name] for result in results)
            for name in ("episodes_per_s", "rollout", "learner")
        )
        largest = max(result["staleness"] for result in results)
        print(
            f"| {staleness} | {speed:.1f} ({speed / base:.2f}x) | {rollout:.0%} | {learner:.0%} | "
            f"{largest:g} |"
        )


if __name__ == "__main__":
    main()
