"""Test and measure on one GPU what CI cannot, in parts of at most ten minutes, without downloads.

    python benchmarks/gpu_acceptance.py            # all parts, on a GPU (make gpu-acceptance)
    python benchmarks/gpu_acceptance.py --small    # the same with small models, on a CPU too
    python benchmarks/gpu_acceptance.py --parts learner-4b-lora vllm

Each part is a process of its own and writes `<part>.json` into the folder of results. A part that
fails or exceeds its limit does not stop the others. The page `gpu.md` is made from all files there,
so parts can be run one after another on machines that are lent for a while. Exits with 1 if a part
of this call failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PART_LIMIT_S = 600.0
GPU_TESTS = ("tests/unit/test_gpu.py", "tests/unit/extras/transfers/test_gpu_transfer.py")
TAIL = 8000  # characters of a part's output that its file keeps
SMOKE = ("train", "conf=smoke", "runs_dir={scratch}/runs")
WORDLE = ("train", "conf=wordle", "trainer.steps=3", "trainer.warm_start.steps=20")
WORDLE += ("eval.num_tasks=8", "eval.baselines=false", "runs_dir={scratch}/runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part: the arguments of `python`, full and small. `{output}` is a file for its figures."""

    command: Sequence[str]
    small: Sequence[str] | None  # None: it needs a GPU
    is_default: bool = True  # False: it needs two GPUs, and runs if --parts names it


def learner_part(shape: str, kind: str, side: str) -> Part:
    common = ["benchmarks/gpu_learner.py", "--train", kind, "--side", side, "--output", "{output}"]
    is_first = shape == "0.6b"
    small = [*common, "--tiny", "--steps", "1"] if is_first else None
    return Part(command=[*common, "--shape", shape, "--steps", "3"], small=small)


def publish_part(transfers: Sequence[str], *, is_default: bool) -> Part:
    """Publish to a vLLM server. The full form has the shape of a model of 0.6B parameters."""
    common = ["benchmarks/vllm_rollout.py", "--only", "publishing", "--output", "{output}"]
    shape = ["hidden_size=1024", "num_layers=28", "intermediate_size=3072"]
    on_cpu = [each for each in transfers if each != "ipc"]
    return Part(
        command=[*common, "--transfers", *transfers, "--device", "cuda", "--model", *shape],
        small=[*common, "--transfers", *on_cpu, "--published", "2"],
        is_default=is_default,
    )


def cli(*arguments: str) -> list[str]:
    return ["-m", "openenv_pipe.cli.main", *arguments]


PARTS: dict[str, Part] = {
    "tests": Part(
        command=["-m", "pytest", "-m", "gpu", "-q", *GPU_TESTS],
        small=["-m", "pytest", "-q", "tests/unit/test_device_placement.py"],
    ),
    **{
        f"learner-{shape}-{kind}" + ("-trl" if side == "trl" else ""): learner_part(
            shape, kind, side
        )
        for shape in ("0.6b", "1.7b", "4b")
        for kind in ("lora", "full")
        for side in ("ours", "trl")
    },
    "publish": publish_part(["files", "ipc"], is_default=True),
    "publish-broadcast": publish_part(["broadcast"], is_default=False),
    "train-smoke": Part(
        command=cli(*SMOKE, "device=cuda"),
        small=cli(*SMOKE, "device=cpu", "trainer.steps=1", "eval.baselines=false"),
    ),
    "train-wordle": Part(command=cli(*WORDLE, "device=cuda"), small=None),
    "train-wordle-vllm": Part(command=cli(*WORDLE, "device=cuda", "engine=vllm"), small=None),
}


def run_part(name: str, part: Part, folder: Path, *, small: bool, limit_s: float) -> dict[str, Any]:
    """Run a part in a process group of its own, and write and return its result."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "figures.json")
        asked = part.small if small else part.command
        assert asked is not None, f"{name} needs a GPU"
        command = [
            each.replace("{output}", str(output)).replace("{scratch}", scratch) for each in asked
        ]
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=limit_s)
            problem = f"exit code {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            problem = f"not done within {limit_s:g} s"
        figures = json.loads(output.read_text()) if output.exists() else None
    result = {
        "part": name,
        "small": small,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *asked]),
        "seconds": round(time.monotonic() - started, 1),
        "problem": problem,
        "figures": figures,
        "output": out[-TAIL:],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page: what passed, and the learner's table from all parts that have figures."""
    lines = [
        "# On a GPU",
        "",
        "Made by `benchmarks/gpu_acceptance.py` from the files beside it.",
        "",
    ]
    lines += ["| part | date | seconds | result |", "|---|---|---|---|"]
    for each in results:
        told = each["problem"] or ("passed, small" if each["small"] else "passed")
        lines.append(f"| {each['part']} | {each['date'][:10]} | {each['seconds']} | {told} |")
    lines += ["", "## Learner", ""]
    lines += ["| device | shape | trained | by | tokens | checkpointed | tokens/s | MFU | peak |"]
    lines += ["|" + "---|" * 9]
    for each in results:
        figures = each["figures"] or {}
        for case in figures.get("cases", []):
            tokens = case["members"] * (case["prompt"] + case["reply"])
            cells = [figures["device"], figures["shape_name"], figures["train"]]
            cells += [f"TRL {figures['trl']}" if figures["side"] == "trl" else "ours", tokens]
            cells.append("yes" if case["activation_checkpointing"] else "no")
            if "error" in case:
                cells += [case["error"].split(". ")[0], "", ""]
            else:
                peak = f"{case['peak_mb'] / 1e3:.1f} GB" if "peak_mb" in case else ""
                share = f"{case['share_of_product_rate']:.0%}"
                cells += [f"{case['tokens_per_s']:.0f}", share, peak]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "MFU is the share of the rate of a large bfloat16 product on the same device,"]
    lines += [
        "by the products that a step needs: tokens that samples share count once, on both sides."
    ]
    lines += ["", "## Publishing", ""]
    lines += ["| device | what is published | over | MB | median, ms | MB/s |", "|" + "---|" * 6]
    for each in results:
        for row in (each["figures"] or {}).get("published", []):
            size = row["bytes"] / 1e6
            cells = [row["device"], row["publish"], row["transfer"], f"{size:.1f}"]
            cells += [f"{row['median_ms']:.0f}", f"{1e3 * size / row['median_ms']:.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_parts = [name for name, part in PARTS.items() if part.is_default]
    parser.add_argument("--small", action="store_true", help="small models, on a CPU too")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=default_parts)
    parser.add_argument("--limit-s", type=float, default=PART_LIMIT_S, help="of each part")
    default = ROOT / "benchmarks" / "results" / "gpu"
    parser.add_argument("--folder", type=Path, default=default)
    asked = parser.parse_args()
    chosen = {name: PARTS[name] for name in asked.parts}
    if asked.small:
        chosen = {name: part for name, part in chosen.items() if part.small is not None}
    failed = []
    for name, part in chosen.items():
        print(f"{name}: running", flush=True)
        result = run_part(name, part, asked.folder, small=asked.small, limit_s=asked.limit_s)
        print(f"{name}: {result['problem'] or 'passed'} ({result['seconds']} s)", flush=True)
        if result["problem"]:
            failed.append(name)
            print(result["output"], flush=True)
    files = sorted(asked.folder.glob("*.json"))
    written = asked.folder.parent / f"{asked.folder.name}.md"
    written.write_text(page([json.loads(file.read_text()) for file in files]))
    print(f"page: {written}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
