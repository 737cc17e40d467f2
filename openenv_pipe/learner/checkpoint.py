"""What a checkpoint's folder holds: weights or adapter, tokenizer, optimizer, counters.

Tensors are safetensors only; nothing is ever unpickled.
"""

import json
from pathlib import Path

from safetensors.torch import save_file

from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.policy import Policy


def save_checkpoint(folder: Path, policy: Policy, optimizer: Optimizer | None, step: int) -> None:
    """Writes into an empty folder. With an adapter, the base model's weights are not copied."""
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    counters = {"step": step, "optimizer_steps": 0}
    if optimizer is not None:
        counters["optimizer_steps"] = optimizer.num_steps_taken
        if tensors := optimizer.tensors():
            save_file(tensors, folder / "optimizer.safetensors")
    (folder / "counters.json").write_text(json.dumps(counters, indent=2) + "\n")
