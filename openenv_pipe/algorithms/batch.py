"""What the learner computes at once: samples packed into one row.

Shape letters: T tokens of a batch's row, N that are trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openenv_pipe.types import Sample

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, slots=True)
class Node:
    """A span of a packed row, whose tokens belong to the same samples at the same positions.

    Its tokens attend causally to each other, and to all tokens of its ancestors.
    """

    start: int
    end: int
    subtree_end: int  # one past the last token of the nodes below, which follow without a gap
    depth: int  # the position of its first token in its samples
    parent: int  # index of the node above; -1: none


@dataclass(kw_only=True, slots=True)
class Batch:
    """Samples packed into one row of T tokens without padding; shared prefixes may be stored once.

    The N trained tokens are listed sample by sample. A trained token that several samples share is
    listed once for each, but computed once: U are computed, from F <= U tokens of the row.
    """

    token_ids: "torch.Tensor"  # [T] int64
    positions: "torch.Tensor"  # [T] int64, of a token in its sample
    nodes: list[Node]  # depth first, covering the row
    predictors: "torch.Tensor"  # [U] int64: the indices in the row that predict trained tokens
    targets: "torch.Tensor"  # [U] int64: the trained tokens' ids
    finished: "torch.Tensor"  # [F] int64: the predictors, each once, whose hidden states are used
    places: "torch.Tensor"  # [N] int64: the index in U of each trained token
    samples: Sequence[Sample]
    sample_index: "torch.Tensor"  # [N] int64: which of the batch's samples a token belongs to
    episode_tokens: "torch.Tensor"  # [N] float32: trained tokens of the episode of each token
    logprobs: "torch.Tensor"  # [N] float32: the sampler's
    advantages: "torch.Tensor"  # [N] float32
    environment_places: "torch.Tensor | None"  # [E] int64, likewise of the environment's tokens
    is_shared: bool  # True if a token may belong to several samples
    counts: bool = True  # False: computed only because other ranks compute one as well

    @property
    def env(self) -> str:
        """The environment of the first sample. All samples have the same teacher."""
        return self.samples[0].env
