"""What a checkpoint's folder holds: weights or adapter, tokenizer, optimizer, counters.

Tensors are safetensors only; nothing is ever unpickled.
"""

import json
from pathlib import Path

from safetensors.torch import save_file

from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.policy import Policy


def save_checkpoint(
    folder: Path,
    policy: Policy,
    optimizer: Optimizer | None,
    *,
    steps: int,
    warm_start_steps: int = 0,
) -> None:
    """Writes into an empty folder. With an adapter, the base model's weights are not copied.

    `steps` of GRPO and `warm_start_steps` are those that the weights have behind them.
    """
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    _sort_target_modules(folder / "adapter_config.json")
    counters = {"steps": steps, "warm_start_steps": warm_start_steps, "optimizer_steps": 0}
    if optimizer is not None:
        counters["optimizer_steps"] = optimizer.num_steps_taken
        if tensors := optimizer.tensors():
            save_file(tensors, folder / "optimizer.safetensors")
    (folder / "counters.json").write_text(json.dumps(counters, indent=2) + "\n")


def _sort_target_modules(path: Path) -> None:
    """peft writes a set in the order of its hashes, which differs from process to process."""
    if path.exists():
        config = json.loads(path.read_text())
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
