"""Save and load a checkpoint's weights, optimizer and reference, bit for bit.

The folder holds weights or adapter, tokenizer and counters; its `resume/` the optimizer and the
reference. All tensors are safetensors; nothing is ever unpickled.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.safetensors_only import load_adapter, read_model

OPTIMIZER, REFERENCE = "optimizer.safetensors", "reference.safetensors"
PROGRESS = "progress.json"


def save_weights(folder: Path, policy: Policy, *, steps: int, warm_start_steps: int) -> None:
    """Write into an empty folder. With an adapter, the base model's weights are not copied.

    `steps` (of GRPO) and `warm_start_steps` are the steps that produced the weights.
    """
    with _full_disk_as_os_error(folder):
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    _sort_target_modules(folder / "adapter_config.json")
    _write(folder / "counters.json", {"steps": steps, "warm_start_steps": warm_start_steps})


def load_weights(folder: Path, policy: Policy) -> None:
    """Load the weights of a checkpoint of the same model and adapter settings into the policy."""
    if (folder / "adapter_config.json").exists():
        load_adapter(policy.model, folder, policy.device)
        return
    dtype = next(policy.model.parameters()).dtype
    # transformers reads back its own names and file splits.
    saved = read_model(str(folder), dtype=dtype)
    policy.model.load_state_dict(saved.state_dict())


def save_progress(folder: Path, policy: Policy, optimizer: Optimizer | None) -> None:
    """Write the optimizer and the reference into an empty folder."""
    with _full_disk_as_os_error(folder):
        if optimizer is not None and (tensors := optimizer.tensors()):
            save_file(tensors, folder / OPTIMIZER)
        if policy.reference is not None:
            named = {str(number): tensor for number, tensor in enumerate(policy.reference)}
            save_file(named, folder / REFERENCE)
    steps_taken = optimizer.num_steps_taken if optimizer is not None else 0
    _write(folder / PROGRESS, {"optimizer_steps": steps_taken})


def load_progress(folder: Path, policy: Policy, optimizer: Optimizer | None) -> None:
    """Load what `save_progress` wrote. State whose file a fork left out keeps its initial value."""
    if optimizer is not None and (folder / OPTIMIZER).exists():
        steps_taken = json.loads((folder / PROGRESS).read_text())["optimizer_steps"]
        optimizer.load(load_file(folder / OPTIMIZER), steps_taken)
    if (folder / REFERENCE).exists():
        named = load_file(folder / REFERENCE, device=str(policy.device))
        policy.keep_reference([named[str(number)] for number in range(len(named))])


@contextlib.contextmanager
def _full_disk_as_os_error(folder: Path) -> Iterator[None]:
    """Turn the error that safetensors raises on a full disk into an OSError with ENOSPC."""
    try:
        yield
    except SafetensorError as error:
        if "No space left" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _sort_target_modules(path: Path) -> None:
    """Sort the list that peft writes from a set, whose order differs from process to process."""
    if path.exists():
        config = json.loads(path.read_text())
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
