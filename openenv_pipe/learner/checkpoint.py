"""What a checkpoint's folder holds, and how training goes on from it, to the bit.

Weights or adapter, tokenizer and counters for everyone; in `resume/` the optimizer and the
reference. Tensors are safetensors only; nothing is ever unpickled.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft import set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.models.policy import Policy

OPTIMIZER, REFERENCE = "optimizer.safetensors", "reference.safetensors"
PROGRESS = "progress.json"


def save_weights(folder: Path, policy: Policy, *, steps: int, warm_start_steps: int) -> None:
    """Writes into an empty folder. With an adapter, the base model's weights are not copied.

    `steps` of GRPO and `warm_start_steps` are those that the weights have behind them.
    """
    with _full_disk_as_os_error(folder):
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    _sort_target_modules(folder / "adapter_config.json")
    _write(folder / "counters.json", {"steps": steps, "warm_start_steps": warm_start_steps})


def load_weights(folder: Path, policy: Policy) -> None:
    """The policy takes the weights of a checkpoint of its own kind."""
    if (folder / "adapter_config.json").exists():
        tensors = load_file(folder / "adapter_model.safetensors", device=str(policy.device))
        set_peft_model_state_dict(policy.model, tensors)
        return
    dtype = next(policy.model.parameters()).dtype
    # By transformers' own reader, which knows how it names and splits what it has written.
    saved = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, dtype=dtype)
    policy.model.load_state_dict(saved.state_dict())


def save_progress(folder: Path, policy: Policy, optimizer: Optimizer | None) -> None:
    """Writes what the next step needs beside the weights into an empty folder."""
    with _full_disk_as_os_error(folder):
        if optimizer is not None and (tensors := optimizer.tensors()):
            save_file(tensors, folder / OPTIMIZER)
        if policy.reference is not None:
            named = {str(number): tensor for number, tensor in enumerate(policy.reference)}
            save_file(named, folder / REFERENCE)
    steps_taken = optimizer.num_steps_taken if optimizer is not None else 0
    _write(folder / PROGRESS, {"optimizer_steps": steps_taken})


def load_progress(folder: Path, policy: Policy, optimizer: Optimizer | None) -> None:
    """The inverse of `save_progress`. A fork may have left files out: those begin anew."""
    if optimizer is not None and (folder / OPTIMIZER).exists():
        steps_taken = json.loads((folder / PROGRESS).read_text())["optimizer_steps"]
        optimizer.load(load_file(folder / OPTIMIZER), steps_taken)
    if (folder / REFERENCE).exists():
        named = load_file(folder / REFERENCE, device=str(policy.device))
        policy.keep_reference([named[str(number)] for number in range(len(named))])


@contextlib.contextmanager
def _full_disk_as_os_error(folder: Path) -> Iterator[None]:
    """safetensors has an error of its own for it."""
    try:
        yield
    except SafetensorError as error:
        if "No space left" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _sort_target_modules(path: Path) -> None:
    """peft writes a set in the order of its hashes, which differs from process to process."""
    if path.exists():
        config = json.loads(path.read_text())
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
