"""Compare a sweep of short jobs, which share servers, with the same number of separate runs.

Both do the same runs one after another, in alternation; each separate run starts its own servers.
With --engine vllm that includes a vLLM server (`openenv-pipe engine install vllm`).

    python benchmarks/sweep.py [--jobs 8] [--rounds 3] [--engine local]

Tables are kept in benchmarks/results/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOB = (
    *("conf=echo", "device=cpu", "num_threads=1", "host.sessions_per_server=8"),
    *("trainer.steps=1", "trainer.tasks_per_step=2", "trainer.group_size=4"),
    *("eval.num_tasks=4", "eval.num_resamples=100"),
)
# All jobs have the same base model, so that one server fits them; only their seeds differ.
VLLM = ("engine=vllm", "engine.publish=full")


def run(folder: Path, *arguments: str) -> float:
    """Run a command and return its seconds. Its output is kept in the folder."""
    started = time.perf_counter()
    with (folder / "output.txt").open("ab") as output:
        subprocess.run(
            [sys.executable, "-m", "openenv_pipe.cli.main", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=output,
            stderr=output,
            check=True,
        )
    return time.perf_counter() - started


def separate(folder: Path, job: Sequence[str], num_jobs: int) -> tuple[float, int]:
    """Return the seconds of the separate runs and the number of servers they started."""
    took_s = sum(run(folder, "train", *job, f"seed={seed}") for seed in range(num_jobs))
    logs = "runs/*/[0-9]*/logs/attempt_*"  # The link `latest` would count a folder twice.
    kinds = ("env-*.log", "engine.log")
    return took_s, sum(len(list(folder.glob(f"{logs}/{kind}"))) for kind in kinds)


def swept(folder: Path, job: Sequence[str], num_jobs: int) -> tuple[float, int]:
    """Return the seconds of the sweep and the number of servers it started."""
    took_s = run(folder, "train", "-m", *job, f"seed=range(0,{num_jobs})")
    (sweep,) = folder.glob("runs/sweeps/*")
    jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
    assert [each["status"] for each in jobs] == ["finished"] * num_jobs
    return took_s, len(list(sweep.glob("servers/*/*")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    arguments = parser.parse_args()
    job = JOB if arguments.engine == "local" else (*JOB, *VLLM)
    times_s: dict[str, list[float]] = {"separate runs": [], "one sweep": []}
    num_started: dict[str, int] = {}
    for _ in range(arguments.rounds):
        for name, way in (("separate runs", separate), ("one sweep", swept)):
            with tempfile.TemporaryDirectory(prefix="openenv-pipe-bench-") as folder:
                took_s, num_started[name] = way(Path(folder), job, arguments.jobs)
            times_s[name].append(took_s)
            print(f"{name}: {took_s:.1f} s", file=sys.stderr, flush=True)
    ratios = [one / many for many, one in zip(*times_s.values(), strict=True)]
    print(f"| {arguments.jobs} jobs, engine={arguments.engine} | seconds | servers started |")
    print("|---|---|---|")
    for name, took_s in times_s.items():
        print(f"| {name} | {statistics.median(took_s):.1f} | {num_started[name]} |")
    print(f"\nThe sweep takes {statistics.median(ratios):.0%} of the time of separate runs.")


if __name__ == "__main__":
    main()
