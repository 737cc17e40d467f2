"""What the engine needs of the policy that is trained. The learner's `Publication` is one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


class Trainee(Protocol):
    """Its methods block, and run in torch's thread. P prompts, V vocabulary."""

    lora_rank: int  # 0: all weights are trained
    precision: str  # "float32" or "bfloat16": of the matrix products
    vocabulary_size: int
    end_id: int

    def write_base(self, folder: Path) -> None:
        """The model without its adapter, and the tokenizer."""

    def write_adapter(self, folder: Path) -> None:
        """The adapter alone."""

    def write_weights(self, folder: Path) -> None:
        """All weights, the adapter merged into them."""

    def weights(self) -> "Mapping[str, torch.Tensor]":
        """The same, in memory: as a checkpoint names them, and where the learner has them."""

    def write_probe(
        self, folder: Path, prompts: Sequence[Sequence[int]], temperature: float, *, moves: float
    ) -> np.ndarray:
        """An adapter of made-up values that moves logprobs by `moves`; the logprobs [P, V]."""

    def free_memory(self) -> None:
        """Gives back what was taken for an update and is kept for the next one, on a GPU."""

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> np.ndarray:
        """Logprobs [P, V] of what follows each prompt."""
