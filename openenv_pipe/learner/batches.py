"""A policy's batches: packed rows, sharing what samples begin with where that is worth it."""

import dataclasses
from collections.abc import Iterator, Sequence

from openenv_pipe.algorithms.packing import pack, shared_share, split_by_budget
from openenv_pipe.learner.ranks import ALONE, Ranks
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Batch, Sample

MIN_SHARED = 0.05  # of all tokens; below, sorting out what is shared saves nothing


def batches_of(
    samples: Sequence[Sample], tokens_per_batch: int, policy: Policy, ranks: Ranks = ALONE
) -> Iterator[Batch]:
    """All samples that have trained tokens, each in one batch, under the token budget; of several
    ranks, this one's batches."""
    trained = [sample for sample in samples if any(sample.loss_mask)]
    share = policy.packs_rows and shared_share(trained) >= MIN_SHARED
    rows = split_by_budget(trained, tokens_per_batch, share=share, num_ranks=ranks.size)
    for indices, counts in ranks.deal(rows):
        part = [trained[index] for index in indices]
        batch = pack(part, share=share, device=policy.device)
        yield batch if counts else dataclasses.replace(batch, counts=False)
