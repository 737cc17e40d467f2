"""Compare the steps of two checkouts of this project: seconds and processor seconds a token.

    python benchmarks/versions.py BEFORE AFTER [--models tiny FOLDER ...] [--rounds 3]

BEFORE, AFTER: the folders of two checkouts. Both run with the packages of this Python. Rounds
alternate, so that other load on the machine reaches both; a run's first step is not counted.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

STEPS = (
    *("conf=echo", "model.dtype=float32", "model.autocast=float32", "device=cpu", "num_threads=1"),
    *("trainer.steps=6", "trainer.tasks_per_step=8", "trainer.group_size=8"),
    *("trainer.warm_start.steps=0", "trainer.checkpoint.every=100", "eval.num_tasks=2"),
    *("trainer.optimizer.type=adamw", "trainer.optimizer.lr=1e-4"),
    *("env.max_reply_tokens=32", "env.max_turns=4", "env.max_episode_tokens=500"),
)
MEASURES = ("sampling, us a token", "update, us a token", "processor, s a run")


def measure(checkout: Path, model: str) -> list[float]:
    """Train for a few steps in a checkout's code, and return the MEASURES."""
    is_folder = Path(model).is_dir()
    chosen = (
        ["model=hub", f"model.path={model}", "model.lora.rank=0"]
        if is_folder
        else [f"model={model}"]
    )
    with tempfile.TemporaryDirectory() as runs:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "openenv_pipe.cli.main",
                "train",
                *chosen,
                *STEPS,
                f"runs_dir={runs}",
            ],
            cwd=runs,
            env={**os.environ, "PYTHONPATH": str(checkout), "OMP_WAIT_POLICY": "PASSIVE"},
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        (file,) = Path(runs).glob("echo/0001/metrics.jsonl")
        steps = [json.loads(line) for line in file.read_text().splitlines()][1:]
    sampling = statistics.median(1e6 * s["time/rollout_s"] / s["tokens/sampled"] for s in steps)
    update = statistics.median(1e6 / s["time/learner_tokens_per_s"] for s in steps)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [sampling, update, processor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--models", nargs="+", default=["tiny"])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    sides = {"before": chosen.before.resolve(), "after": chosen.after.resolve()}
    print(f"{platform.machine()}, torch {torch.__version__}, medians of {chosen.rounds}\n")
    print(f"| model | measure | {' | '.join(sides)} | after / before |\n|{'---|' * 5}")
    for model in chosen.models:
        found: dict[str, list[list[float]]] = {side: [] for side in sides}
        for number in range(chosen.rounds):
            for side in sorted(sides, reverse=number % 2 == 1):
                found[side].append(measure(sides[side], model))
        for index, name in enumerate(MEASURES):
            before, after = (
                statistics.median(each[index] for each in found[side]) for side in sides
            )
            row = (Path(model).name, name, f"{before:.1f}", f"{after:.1f}", f"{after / before:.2f}")
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
