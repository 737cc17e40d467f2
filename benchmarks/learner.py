"""Compare a GRPO step of this project's learner with TRL's: time, memory, and equal results.

Both get the same model, samples and optimizer (`learner_sides.py`), each in its own process. Losses
and gradients are compared first. Steps are then timed in alternation; a round's first step is not
counted. Peak memory is the most that the process held during the steps, minus what it held with the
model loaded. CPU seconds are printed beside wall seconds, because other load on the machine changes
them less.

    python benchmarks/learner.py                        # the bars: minutes
    python benchmarks/learner.py --grid                 # all lengths, group sizes and models: hours
    python benchmarks/learner.py --cases 20M:512/64:16  # model:prompt/reply:group size
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
LAYOUT = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_size", "vocabulary")
MODELS = {
    "1M": (128, 1024, 2, 4, 4, 32, 261),
    "20M": (512, 1536, 6, 8, 8, 64, 261),
    "100M": (768, 3072, 11, 12, 12, 64, 261),
    "150k": (256, 1024, 2, 4, 4, 64, 151_936),
}
LENGTHS = ("64/64", "512/64", "1024/256")
GROUP_SIZES = (4, 8, 16)
BARS = ("1M:64/64:8", "1M:512/64:16", "20M:512/64:16", "150k:64/64:8")
SIDES = ("ours", "trl")
PACKAGES = ("torch", "transformers", "trl", "numpy")
MIN_ROUND_S = 0.3  # Short steps are repeated, so that a round lasts at least about this long.
COLUMNS = (
    *("model:prompt/reply:group", "TRL, s", "ours, s", "times faster", "TRL, MB", "ours, MB"),
    *("memory", "of product rate", "gradients differ by"),
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
LOSS_BOUND, GRADIENT_BOUND = 1e-5, 1e-4


class Side:
    """One of the two learners, or `learner_sides.Rate`, in its own process."""

    def __init__(self, name: str, case: dict[str, Any], num_threads: int) -> None:
        command = [sys.executable, str(HERE / "learner_sides.py"), name, json.dumps(case)]
        self._process = subprocess.Popen(
            [*command, str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parent)},
        )

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps({"do": do, **options}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def parse_case(text: str) -> dict[str, Any]:
    name, lengths, group_size = text.split(":")
    return {
        "name": text,
        "shape": dict(zip(LAYOUT, MODELS[name], strict=True)),
        "lengths": [int(length) for length in lengths.split("/")],
        "group_size": int(group_size),
    }


def measure(case: dict[str, Any], num_rounds: int, num_threads: int) -> dict[str, Any]:
    """Return the times and the memory of one case."""
    sides = {name: Side(name, case, num_threads) for name in SIDES}
    rate = Side("rate", case, num_threads)
    try:
        first = {name: side.ask("steps", count=1) for name, side in sides.items()}
        counts = {name: max(1, round(MIN_ROUND_S / first[name]["step_s"])) for name in SIDES}
        times: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
        rates = []
        for _ in range(num_rounds):
            for name, side in sides.items():
                times[name].append(side.ask("steps", count=counts[name]))
            rates.append(rate.ask("rate"))
        memory = {name: side.ask("memory") for name, side in sides.items()}
    finally:
        for side in (*sides.values(), rate):
            side.close()
    return summarise(case["name"], times, rates, memory)


def compare(case: dict[str, Any], num_threads: int) -> dict[str, float]:
    """Return how far losses and gradients differ. Raises AssertionError if they differ too much."""
    losses, gradients = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in SIDES:
            side, path = Side(name, case, num_threads), f"{folder}/{name}.safetensors"
            try:
                losses.append(side.ask("gradients", path=path)["loss"])
            finally:
                side.close()
            gradients.append(load_file(path))
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    worst = max(
        ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item()
        for name in theirs
    )
    assert abs(losses[0] - losses[1]) <= LOSS_BOUND, losses
    assert worst <= GRADIENT_BOUND, worst
    return {"loss_difference": abs(losses[0] - losses[1]), "gradient_difference": worst}


def summarise(name: str, times: dict, rates: list, memory: dict) -> dict[str, Any]:
    found: dict[str, Any] = {"case": name}
    for side in SIDES:
        above_mb = memory[side]["peak_mb"] - memory[side]["start_mb"]
        found[side] = {
            "step_s": statistics.median(each["step_s"] for each in times[side]),
            "cpu_s": statistics.median(each["cpu_s"] for each in times[side]),
            "rounds_s": [each["step_s"] for each in times[side]],
            "above_start_mb": above_mb,
            **memory[side],
        }
    ours, theirs = found["ours"], found["trl"]
    rate = statistics.median(each["rate"] for each in rates)
    return found | {
        "times_faster": statistics.median(
            other["step_s"] / own["step_s"]
            for own, other in zip(times["ours"], times["trl"], strict=True)
        ),
        "times_less_cpu": theirs["cpu_s"] / ours["cpu_s"],
        "memory_share": ours["above_start_mb"] / theirs["above_start_mb"],
        "product_rate": rate,
        "share_of_product_rate": rates[0]["needed"] / ours["step_s"] / rate,
    }


def row(found: dict[str, Any]) -> str:
    ours, theirs = found["ours"], found["trl"]
    return (
        f"| {found['case']} | {theirs['step_s']:.3g} | {ours['step_s']:.3g} "
        f"| {found['times_faster']:.1f} | {theirs['above_start_mb']:.0f} "
        f"| {ours['above_start_mb']:.0f} | {found['memory_share']:.0%} "
        f"| {found['share_of_product_rate']:.0%} | {found['gradient_difference']:.0e} |"
    )


def machine(num_threads: int) -> dict[str, Any]:
    models = {
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": ", ".join(sorted(models)),
        "threads": num_threads,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=BARS)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "learner.json")
    arguments = parser.parse_args()
    cases = arguments.cases
    if arguments.grid:
        cases = [":".join(map(str, c)) for c in itertools.product(MODELS, LENGTHS, GROUP_SIZES)]
    results = {"machine": machine(arguments.threads), "cases": []}
    print(HEAD)
    for text in cases:
        case = parse_case(text)
        difference = compare(case, arguments.threads)
        found = measure(case, arguments.rounds, arguments.threads) | difference
        results["cases"].append(found)
        arguments.output.parent.mkdir(exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")
        print(row(found), flush=True)


if __name__ == "__main__":
    main()
