"""Take one tiny model of each family through check, training, export and resume.

    python benchmarks/families.py FOLDERS [--families NAME ...] [--lora]

FOLDERS: a folder with a model's folder for each family, in float32, with windows and chunks of few
tokens. Each family is checked, trained for two steps (with --lora, an adapter), exported, read
again by transformers alone, and resumed for a third step. Prints a table in Markdown: how it is
sampled and trained, the largest mismatch between sampler and trainer, the largest difference of a
logprob between the exported model and the trained one, and what failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from openenv_pipe.config.compose import compose
from openenv_pipe.models.load import load_policy
from openenv_pipe.runs.metrics import read_metrics

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
SMALL = (
    *("conf=echo", "model=hub", "model.dtype=float32", "model.autocast=float32", "device=cpu"),
    *("trainer.steps=2", "trainer.warm_start.steps=0", "trainer.tasks_per_step=2"),
    *("trainer.group_size=2", "eval.num_tasks=1", "eval.samples_per_task=1"),
    *("eval.baselines=false", "trainer.checkpoint.every=1", "env.max_episode_tokens=2048"),
)
COLUMNS = ("family", "sampling", "training", "mismatch", "export", "resume", "rejected because")


def command(*words: str) -> str:
    """Run a command of openenv-pipe. Returns why it failed, "" if it did not."""
    done = subprocess.run(
        [sys.executable, "-m", "openenv_pipe.cli.main", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else (lines or ["no output"])[-1]


def try_family(model: Path, runs: Path, rank: int) -> list[str]:
    """Return a row of the table."""
    settings = (*SMALL, f"model.path={model}", f"model.lora.rank={rank}", f"runs_dir={runs}")
    if failure := command("train", *settings):
        return [model.name, "", "", "", "", "", failure]
    run = next(runs.glob("echo/0*"))
    forward = json.loads((run / "run.json").read_text())["facts"]["forward"]
    records = read_metrics(run / "metrics.jsonl")
    mismatch = max(each["mismatch/max"] for each in records if "mismatch/max" in each)
    exported = runs / "exported"
    failure = command("export", str(run), f"--output={exported}")
    export = failure or f"{export_difference(run, exported, settings):.1e}"
    resume = command("train", f"--resume={run}", "trainer.steps=3") or "yes"
    paths = [forward["sampler"], forward["learner"]]
    return [model.name, *paths, f"{mismatch:.1e}", export, resume, ""]


@torch.inference_mode()
def export_difference(run: Path, exported: Path, settings: tuple[str, ...]) -> float:
    """Return how much logprobs of the exported model differ from those of the last checkpoint."""
    config = compose(settings).config.model
    checkpoint = sorted(run.glob("checkpoints/step_*"))[-1]
    policy = load_policy(config, seed=0, device=torch.device("cpu"), checkpoint=checkpoint)
    token_ids = torch.arange(5, 65)[None]
    found = transformers.AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    ours, theirs = policy.model_logits(token_ids), found(input_ids=token_ids).logits
    difference = torch.log_softmax(ours, dim=-1) - torch.log_softmax(theirs, dim=-1)
    return float(difference.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path)
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--lora", action="store_true")
    given = parser.parse_args()
    names = given.families or sorted(each.name for each in given.folders.iterdir())
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS), flush=True)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="families-") as folder:
            row = try_family(given.folders / name, Path(folder), 4 if given.lora else 0)
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
