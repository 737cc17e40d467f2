"""Save and load a checkpoint's weights, optimizer and reference, bit for bit.

The folder holds weights or adapter, tokenizer and counters; its `resume/` the optimizer and the
reference. All tensors are safetensors; nothing is ever unpickled.
"""

import json
from pathlib import Path
from typing import Any

from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.models.policy import Policy
from openenv_pipe.system.files import naming

OPTIMIZER, REFERENCE = "optimizer.safetensors", "reference.safetensors"
PROGRESS = "progress.json"


def save_weights(folder: Path, policy: Policy, *, steps: int, warm_start_steps: int) -> None:
    """Write into an empty folder. With an adapter, the base model's weights are not copied.

    `steps` (of GRPO) and `warm_start_steps` are the steps that produced the weights.
    """
    with naming(folder):
        policy.save_model(folder)
        policy.save_tokenizer(folder)
    _sort_target_modules(folder / "adapter_config.json")
    _write(folder / "counters.json", {"steps": steps, "warm_start_steps": warm_start_steps})


def load_weights(folder: Path, policy: Policy) -> None:
    """Load the weights of a checkpoint of the same model and adapter settings into the policy."""
    policy.load_model(folder)


def save_progress(folder: Path, policy: Policy, optimizer: Optimizer | None) -> None:
    with naming(folder):
        if optimizer is not None:
            optimizer.save(folder / OPTIMIZER)
        if policy.reference is not None:
            policy.save_reference(folder / REFERENCE)
    steps_taken = optimizer.num_steps_taken if optimizer is not None else 0
    write_num_steps_taken(folder, steps_taken)


def write_num_steps_taken(folder: Path, num_steps_taken: int) -> None:
    """Write the number of the optimizer's steps, from which the last reference refresh follows."""
    _write(folder / PROGRESS, {"optimizer_steps": num_steps_taken})


def read_num_steps_taken(folder: Path) -> int | None:
    """Read what `write_num_steps_taken` wrote; None if there is nothing."""
    path = folder / PROGRESS
    return int(json.loads(path.read_text())["optimizer_steps"]) if path.exists() else None


def load_progress(folder: Path, policy: Policy, optimizer: Optimizer | None) -> None:
    """Load what `save_progress` wrote. State whose file a fork left out keeps its initial value."""
    steps_taken = read_num_steps_taken(folder)
    if optimizer is not None and steps_taken is not None:
        optimizer.num_steps_taken = steps_taken  # also if it has just forgotten its moments
        if (folder / OPTIMIZER).exists():
            optimizer.load_file(folder / OPTIMIZER, steps_taken)
    if (folder / REFERENCE).exists():
        policy.load_reference(folder / REFERENCE)


def _write(path: Path, values: dict[str, Any]) -> None:
    with naming(path):
        path.write_text(json.dumps(values, indent=2) + "\n")


def _sort_target_modules(path: Path) -> None:
    """Sort the list that peft writes from a set, whose order differs from process to process."""
    if path.exists():
        config = json.loads(path.read_text())
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
