"""Measure the memory of each rank of a sharded policy (trainer.parallel=fsdp), on the CPU.

    python benchmarks/shard_memory.py [--ranks 1 2 4] [--hidden-size 1024] [--layers 12]

Writes a model of random weights, and for each number of ranks starts as many processes, which load
it and train it in full (AdamW, float32) with gloo. Prints a table in Markdown, or with --json what
each rank has measured. All sizes are in bytes; those of tensors are of the storages that live.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fakes import CPU, random_samples, run_config, tiny_model  # noqa: E402

from openenv_pipe.config.schema import RunConfig  # noqa: E402
from openenv_pipe.extras.devices.learner_group import ShardedLearner  # noqa: E402
from openenv_pipe.extras.devices.ranks import ConnectedRanks  # noqa: E402
from openenv_pipe.extras.devices.sharded_load import load_sharded_policy  # noqa: E402
from openenv_pipe.learner.learner import Learner  # noqa: E402
from openenv_pipe.learner.ranks import SINGLE_RANK, Ranks  # noqa: E402
from openenv_pipe.models.load import load_policy  # noqa: E402

TIMEOUT_S = 900
MIB = 2**20


def write_model(folder: Path, hidden_size: int, num_layers: int) -> None:
    """Write a model whose layers are most of its weights, as a folder of transformers."""
    shape = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "head_size": 64}
    heads = {"num_heads": hidden_size // 64, "num_kv_heads": hidden_size // 64}
    tiny = tiny_model().model_copy(update=shape | heads | {"num_layers": num_layers})
    policy = load_policy(tiny, seed=0, device=CPU)
    policy.save_model(folder)
    policy.tokenizer.save_pretrained(folder)


def model_config(folder: str, ranks: Ranks) -> RunConfig:
    kept = {"lora", "chat_template", "dtype", "autocast", "activation_checkpointing"}
    kept |= {"quantization", "history", "template_time"}
    model = {key: value for key, value in tiny_model().model_dump().items() if key in kept}
    model |= {
        "type": "hub",
        "path": folder,
        "revision": None,
        "chat_template_kwargs": {},
        "activation_checkpointing": True,
    }
    changes = {"trainer.parallel": "fsdp", "trainer.devices": ranks.size}
    return run_config({"model": model, **changes, "trainer.tokens_per_batch": 64})


def live_bytes() -> int:
    """Sum the storages of all tensors that Python objects refer to."""
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            part = each.to_local() if hasattr(each, "to_local") else each
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


def peak_rss_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) * 1024


def run_rank(rank: int, size: int, folder: str, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    ranks = ConnectedRanks(rank, size) if size > 1 else SINGLE_RANK
    config = model_config(folder, ranks)
    before = peak_rss_bytes()
    if size > 1:
        ranks.join(rendezvous, CPU)
        policy = load_sharded_policy(config.model, seed=0, device=CPU, ranks=ranks)
        learner = ShardedLearner(policy, config, ranks)
    else:
        policy = load_policy(config.model, seed=0, device=CPU)
        learner = Learner(
            policy, config.trainer, max_episode_tokens=config.max_episode_tokens, seed=config.seed
        )
    gc.collect()
    found = {"rank": rank, "ranks": size, "whole": 4 * policy.num_parameters}
    found |= {"weights": live_bytes(), "peak of loading": peak_rss_bytes() - before}
    during: list[int] = []
    policy.decoder.layers[-1].register_forward_pre_hook(lambda *_: during.append(live_bytes()))
    for step in (1, 2):
        learner.update(random_samples(step, count=size, max_tokens=12), step)
    gc.collect()
    found |= {"during a pass": max(during), "states": live_bytes()}
    found["peak of training"] = peak_rss_bytes() - before
    print(json.dumps(found))
    ranks.leave()


def measure(sizes: list[int], hidden_size: int, num_layers: int) -> list[dict[str, int]]:
    """Return what each rank measures, for each number of ranks."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "model")
        write_model(folder, hidden_size, num_layers)
        for size in sizes:
            common = [sys.executable, __file__, "--model", str(folder), "--size", str(size)]
            common += ["--rendezvous", str(Path(place, f"rendezvous-{size}")), "--rank"]
            processes = [
                subprocess.Popen([*common, str(rank)], stdout=subprocess.PIPE, text=True)
                for rank in range(size)
            ]
            try:
                for process in processes:
                    out, _ = process.communicate(timeout=TIMEOUT_S)
                    if process.returncode:
                        raise SystemExit(f"a rank of {size} failed with {process.returncode}")
                    found.append(json.loads(out.splitlines()[-1]))
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
    return found


def table(found: list[dict[str, int]]) -> str:
    """Return the highest figure of the ranks, for each number of them, as a table."""
    kinds = ["weights", "during a pass", "states", "peak of loading", "peak of training"]
    lines = ["| ranks | " + " | ".join(kinds) + " | states / those of one |"]
    lines.append("|---" * (len(kinds) + 2) + "|")
    sizes = sorted({each["ranks"] for each in found})
    most = {
        size: {kind: max(each[kind] for each in found if each["ranks"] == size) for kind in kinds}
        for size in sizes
    }
    for size in sizes:
        cells = [f"{most[size][kind] / MIB:.0f} MiB" for kind in kinds]
        share = most[size]["states"] / most[sizes[0]]["states"]
        lines.append(f"| {size} | " + " | ".join(cells) + f" | {share:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    for name in ("--model", "--rank", "--size", "--rendezvous"):  # of the processes it starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        run_rank(int(asked.rank), int(asked.size), asked.model, Path(asked.rendezvous))
        return
    found = measure(asked.ranks, asked.hidden_size, asked.layers)
    if asked.json:
        print(json.dumps(found))
        return
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores ({platform.machine()}), torch "
        f"{torch.__version__}; {found[0]['whole'] // 4 / 1e6:.0f}M parameters\n\n{table(found)}"
    )


if __name__ == "__main__":
    main()
