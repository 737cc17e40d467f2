"""The interface of the trained policy that the engine needs, as `models.weights.Publication`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from openenv_pipe.types import Picture, Pictures

if TYPE_CHECKING:
    import torch


class PolicySource(Protocol):
    """The trained policy. Its methods block; call them in torch's thread.

    Shape letters: P prompts, V vocabulary, N patches of a picture, D numbers of a patch.
    """

    lora_rank: int  # 0: all weights are trained
    precision: str  # "float32" or "bfloat16": of the matrix products
    vocabulary_size: int
    end_ids: frozenset[int]  # any of them ends a turn
    placeholder_id: int | None  # the token where pictures stand; None: a model for text
    probe_pictures: Pictures  # made up, for checks; a model for text has none

    def write_base(self, folder: Path) -> None:
        """Write the model without its adapter, and the tokenizer."""

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter alone."""

    def write_weights(self, folder: Path) -> None:
        """Write all weights, with the adapter merged into them."""

    def weights(self) -> "Mapping[str, torch.Tensor]":
        """Return what `write_weights` writes, on the learner's device."""

    def write_probe(
        self, folder: Path, prompts: Sequence[Sequence[int]], temperature: float, *, moves: float
    ) -> np.ndarray:
        """Write an adapter of made-up values that changes a logprob by at least `moves`.

        Returns:
            The logprobs [P, V] with that adapter.
        """

    def free_memory(self) -> None:
        """Free the GPU memory that torch has cached for its next update."""

    def num_picture_tokens(self, picture: Picture) -> int:
        """Return how many placeholders a picture has in prompts."""

    def read_picture(self, picture: Picture) -> tuple[np.ndarray, np.ndarray]:
        """Return what the model reads of a picture: patches [N, D] in float32, and its grid [3].

        Raises:
            OSError: the picture's file cannot be read.
        """

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> np.ndarray:
        """Compute the logprobs [P, V] of the token after each prompt.

        Prompts may show `probe_pictures`.
        """
