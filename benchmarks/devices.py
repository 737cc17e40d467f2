"""Compare the time of an update by one process and by several, with one thread each.

    python benchmarks/devices.py [--devices 2] [--rounds 5]

Both update the same model (6.5M parameters, float32, trained in full) on the same samples (about 5k
tokens) on a CPU, in turn, so that a change of the machine's load affects both. Prints a table in
Markdown; each figure is the median of the rounds.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from fakes import CPU, random_samples, run_config, tiny_model  # noqa: E402

from openenv_pipe.extras.devices.build import SeveralDevices  # noqa: E402
from openenv_pipe.extras.devices.workers import Workers  # noqa: E402
from openenv_pipe.learner.devices import Devices  # noqa: E402
from openenv_pipe.learner.learner import Learner  # noqa: E402

SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 6, "max_length": 2048}
HEADS = {"num_heads": 4, "num_kv_heads": 4, "head_size": 64}


def build(parallel: str, workers: Workers | None) -> Learner:
    model = tiny_model().model_copy(update=SHAPE | HEADS)
    changes = {"trainer.parallel": parallel, "trainer.tokens_per_batch": 2048}
    if workers:
        changes["trainer.devices"] = workers.ranks.size
    config = run_config({"model": model.model_dump(), **changes})
    devices = SeveralDevices(config, CPU, workers) if workers else Devices(config, CPU)
    policy, _ = devices.load_policy(None)
    return devices.learner(policy)


def measure(parallel: str, workers: Workers, rounds: int) -> Iterator[tuple[float, float]]:
    """Return the seconds of an update by one process and by all of them."""
    samples = random_samples(0, count=64, max_tokens=40)
    learners = build(parallel, None), build(parallel, workers)
    for number in range(rounds + 1):
        took = []
        for learner in learners:
            started = time.perf_counter()
            learner.update(samples, 1)
            took.append(time.perf_counter() - started)
        if number:  # The first update starts the workers.
            yield took[0], took[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f}, torch {torch.__version__}\n"
    )
    print(f"| parallel | one | {asked.devices} | one / {asked.devices} |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as logs:
        workers = Workers(asked.devices, CPU, Path(logs), num_threads=asked.devices)
        try:
            for parallel in ("data", "fsdp"):
                pairs = list(measure(parallel, workers, asked.rounds))
                ratio = median(one / some for one, some in pairs)
                one, some = (median(times) for times in zip(*pairs, strict=True))
                print(f"| {parallel} | {one:.2f} s | {some:.2f} s | {ratio:.2f} |")
        finally:
            workers.close()


if __name__ == "__main__":
    main()
