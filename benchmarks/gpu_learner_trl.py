"""TRL's side of `gpu_learner.py`: `GRPOTrainer._compute_loss` with its fused head, then AdamW.

The loss is called on a stand-in for the trainer, as in `learner_sides.py`. Where all members of a
group do not fit into the GPU's memory at once, they are computed in smaller batches whose gradients
are added up, as with `gradient_accumulation_steps`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from learner_sides import LR, MAX_GRAD_NORM, stand_in, trl_inputs
from peft import PeftModel
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from openenv_pipe.types import Sample


class TrlLearner:
    """Updates a model as TRL's trainer does."""

    def __init__(
        self, model: Any, device: str, *, autocast: torch.dtype, checkpointing: bool
    ) -> None:
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        add_fused_lm_head(base, temperature=1.0, outputs=("log_probs", "entropy"))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        self._model, self._device, self._autocast = model, device, autocast
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=LR, weight_decay=0.0, fused=True)
        self._samples: Sequence[Sample] = ()
        self._at_once = 0

    def update(self, samples: list[Sample], step: int) -> dict[str, float]:
        """Take a step. Raises torch.OutOfMemoryError if one member alone does not fit."""
        if samples is not self._samples:
            self._samples, self._at_once = samples, len(samples)
            given = samples[0].loss_mask.index(True)
            inputs = trl_inputs(samples, given)
            self._inputs = {name: each.to(self._device) for name, each in inputs.items()}
        while True:
            try:
                return self._step()
            except torch.OutOfMemoryError:
                if self._at_once == 1:
                    raise
                self._at_once //= 2
            self._optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _step(self) -> dict[str, float]:
        members, loss = len(self._samples), 0.0
        trainer = stand_in(GRPOTrainer, self._model, self._inputs["completion_ids"].shape[1])
        trainer.current_gradient_accumulation_steps = members // self._at_once
        trainer.accelerator.autocast = partial(
            torch.autocast,
            self._device,
            dtype=self._autocast,
            enabled=self._autocast != torch.float32,
        )
        for first in range(0, members, self._at_once):
            batch = {
                name: each[first : first + self._at_once] if each.ndim else each
                for name, each in self._inputs.items()
            }
            part = GRPOTrainer._compute_loss(trainer, self._model, batch)
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"loss/policy": loss, "grad/norm": norm.item(), "members_at_once": self._at_once}
