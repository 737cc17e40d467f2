"""The optimizer and its learning rate schedule."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from openenv_pipe.config.schema import OptimizerConfig
from openenv_pipe.errors import TrainingError
from openenv_pipe.learner.muon import Muon
from openenv_pipe.models.quantization import load_bitsandbytes

NamedParameters = list[tuple[str, torch.nn.Parameter]]


class Optimizer:
    """Clips gradients, checks that they are finite, steps, and advances the learning rate.

    `muon` orthogonalises the momentum of hidden matrices (Jordan et al. 2024), scaled so that
    AdamW's learning rates fit (Moonlight, arXiv:2502.16982), with a momentum of 0.95; embeddings,
    heads and vectors stay with AdamW (arXiv:1711.05101), to which betas and eps belong.
    `adamw_8bit` is bitsandbytes' AdamW with blockwise 8-bit moments (arXiv:2110.02861); parameters
    of fewer than 4096 values have 32-bit moments.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        config: OptimizerConfig,
        num_steps: int,
        *,
        precision: torch.dtype,
    ) -> None:
        """precision: of the products in which `muon` orthogonalises."""
        self.num_steps_taken = 0
        self.rate_factor = 1.0  # of the learning rate of all further steps
        self._parameters = [parameter for _, parameter in parameters]
        self._config = config
        self._num_steps = num_steps
        hidden = [p for name, p in parameters if config.type == "muon" and _is_hidden(name, p)]
        chosen = {id(parameter) for parameter in hidden}
        others = [p for p in self._parameters if id(p) not in chosen]
        self._parts: list[torch.optim.Optimizer] = []
        if others:
            self._parts.append(_adamw(others, config))
        if hidden:
            self._parts.append(
                Muon(hidden, lr=config.lr, weight_decay=config.weight_decay, precision=precision)
            )

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        share = rate_share(self._config, self.num_steps_taken, self._num_steps)
        return self._config.lr * self.rate_factor * share

    def step(self) -> float:
        """Apply the gradients and clear them; return their norm before clipping.

        Raises TrainingError: the norm is not finite. The weights are unchanged.
        """
        norm = self._clip()
        if not torch.isfinite(norm):
            raise TrainingError(
                f"the gradient's norm is {norm.item()} at optimizer step "
                f"{self.num_steps_taken + 1}; lower the learning rate (now {self.lr:g}) or "
                "max_grad_norm, and look at mismatch/max in metrics.jsonl"
            )
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self.lr
            part.step()
            part.zero_grad(set_to_none=True)
        self.num_steps_taken += 1
        return norm.item()

    def _clip(self) -> torch.Tensor:
        """Clip the gradients, and return their norm; overridden where each rank has a shard."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all state by `<part>.<parameter>.<name>`, for a checkpoint."""
        return {
            f"{number}.{index}.{name}": _own(name, torch.as_tensor(value, device=parameter.device))
            for number, part in enumerate(self._parts)
            for index, parameter in enumerate(_learned(part))
            for name, value in part.state.get(parameter, {}).items()
        }

    def save(self, file: Path) -> None:
        """Write all state into a safetensors file; before the first step there is none."""
        if tensors := self.tensors():
            save_file(tensors, file)

    def forget(self) -> None:
        """Begin with new moments, but not with a new schedule."""
        for part in self._parts:
            part.state.clear()

    def load_file(self, file: Path, num_steps_taken: int) -> None:
        """Load what `save` wrote after `num_steps_taken` steps."""
        self.load(load_file(file), num_steps_taken)

    def load(self, tensors: Mapping[str, torch.Tensor], num_steps_taken: int) -> None:
        """Replace the state by one that `tensors` returned after `num_steps_taken` steps."""
        learned = [_learned(part) for part in self._parts]
        for part in self._parts:
            part.state.clear()
        for key, value in tensors.items():
            number, index, name = key.split(".", 2)
            part, parameter = self._parts[int(number)], learned[int(number)][int(index)]
            # bitsandbytes counts steps in an int, torch in a float tensor.
            is_plain = name == "step" and not value.is_floating_point()
            part.state[parameter][name] = int(value) if is_plain else value.to(parameter.device)
        self.num_steps_taken = num_steps_taken


def _adamw(parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    given: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.type == "adamw_8bit":
        package = load_bitsandbytes("trainer.optimizer.type=adamw_8bit")
        return package.optim.AdamW8bit(parameters, **given)
    return torch.optim.AdamW(parameters, fused=True, **given)


def _own(name: str, values: torch.Tensor) -> torch.Tensor:
    """Make a tensor storable: contiguous, and a copy of the table that 8-bit parameters share."""
    return values.clone() if name.startswith("qmap") else values.contiguous()


def _learned(part: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in part.param_groups for parameter in group["params"]]


def _is_hidden(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter is a matrix between the embedding and the head."""
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def rate_share(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the factor of `lr` at a step, from 0: linear warm-up, then the schedule's decay."""
    if step < config.lr_warmup_steps:
        return (step + 1) / (config.lr_warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    num_decaying = num_steps - config.lr_warmup_steps - 1  # the last step has the final rate
    done = min(1.0, (step - config.lr_warmup_steps) / max(1, num_decaying))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    final = config.final_lr_share or 0.0  # null: these schedules decay to 0
    return final + (1.0 - final) * left
