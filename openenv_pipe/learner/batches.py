"""A policy's batches: packed rows, sharing what samples begin with where that is worth it."""

from collections.abc import Iterator, Sequence

from openenv_pipe.grpo.packing import pack, shared_share, split_by_budget
from openenv_pipe.learner.policy import Policy
from openenv_pipe.types import Batch, Sample

MIN_SHARED = 0.05  # of all tokens; below, sorting out what is shared saves nothing


def batches_of(samples: Sequence[Sample], tokens_per_batch: int, policy: Policy) -> Iterator[Batch]:
    """All samples that have trained tokens, each in one batch, under the token budget."""
    trained = [sample for sample in samples if any(sample.loss_mask)]
    share = policy.packs_rows and shared_share(trained) >= MIN_SHARED
    for indices in split_by_budget(trained, tokens_per_batch, share=share):
        part = [trained[index] for index in indices]
        yield pack(part, share=share, device=policy.device)
