"""Kill short runs at random instants, resume them, and compare them with an undisturbed run.

Each run is killed with SIGKILL several times, at a random line of its metrics and a random moment
after it, and resumed each time; the last resume runs to its end. A run passes if its metrics
(without `time/*`), episodes, evaluations and every file of every checkpoint then equal those of the
undisturbed run byte for byte. The run uses every kind of state: see RUN in
tests/integration/test_resume.py. With `--program`, a program with sub-agents plays: see
PROGRAM in tests/integration/test_program_train.py.

    PYTHONPATH=. python benchmarks/crash.py [--program] [--kills 100] [--kills-per-run 4]
        [--first-seed 0] [--output FILE]

Processes are forked from one that has already imported torch, because that import takes most of
the time of a short run. Real processes are killed and resumed all the same.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.crash_matrix import Result, killed_and_resumed, uninterrupted
from tests.integration import test_program_train, test_resume


def measure(
    run: Sequence[str],
    name: str,
    num_kills: int,
    kills_per_run: int,
    first_seed: int,
    base: Path,
    output: Path | None,
) -> dict:
    """Run trials until the given number of kills is reached."""
    reference = uninterrupted(base / "reference", run, name)
    expected = Result.of(reference.folder)
    results = {
        "benchmark": "crash",
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M}Z",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "run": list(run),
        "kills": 0,
        "resumed_to_the_same_bytes": 0,
        "runs": 0,
        "runs_the_same": 0,
        "different": [],
        "last_checkpoint_when_killed": Counter(),
    }
    seed = first_seed
    while results["kills"] < num_kills:
        count = min(kills_per_run, num_kills - results["kills"])
        folder = base / f"run_{seed}"
        trial = killed_and_resumed(folder, run, name, reference.draw_kills(seed, count))
        difference = Result.of(trial.folder).difference(expected)
        survived = difference is None and not any(trial.codes)
        results["runs"] += 1
        results["runs_the_same"] += survived
        results["kills"] += len(trial.kills)
        results["resumed_to_the_same_bytes"] += len(trial.kills) * survived
        for where in trial.kills:
            results["last_checkpoint_when_killed"][where.split("last checkpoint ")[-1]] += 1
        if not survived:
            results["different"].append({"seed": seed, "codes": trial.codes, "what": difference})
        print(f"run {seed}: {trial.kills} -> {difference or 'the same'}", flush=True)
        if output:
            output.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
        seed += 1
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", action="store_true")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kills-per-run", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        run, name = test_resume.RUN, "smoke"
        if given.program:
            run, name = test_program_train.arguments(Path(base, "agent.py")), "echo"
        results = measure(
            run, name, given.kills, given.kills_per_run, given.first_seed, Path(base), given.output
        )
    print(json.dumps(results, indent=2, sort_keys=True))
    sys.exit(bool(results["different"]))


if __name__ == "__main__":
    main()
