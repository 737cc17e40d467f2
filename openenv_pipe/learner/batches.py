"""Build the batches of an update: packed rows, in which samples share prefixes if it pays off."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from openenv_pipe.algorithms.batch import Batch
from openenv_pipe.algorithms.losses.normalization import Counts
from openenv_pipe.algorithms.packing import pack, prefix_reuse_fraction, split_by_budget
from openenv_pipe.learner.ranks import SINGLE_RANK, Ranks
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Sample

MIN_REUSE_FRACTION = 0.05  # of all tokens; below it, sharing prefixes saves no time


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBatches:
    """The batches of one optimizer update. N: the trained tokens of a batch."""

    batches: Sequence[Batch]
    counts: Counts  # over all batches of the update, those of other ranks included
    # Of each batch [N]: the trainer's logprobs when the step began. None for a loss that does not
    # need them, and for the first update of a single pass, whose own forward pass computes them.
    start_logprobs: Sequence[torch.Tensor] | None
    is_first: bool  # of its pass
    num_parallel: int = 1  # batches to compute at once
    replayed: Sequence[Batch] = ()  # of earlier episodes
    num_replayed_tokens: int = 0  # of the agent in them, those of other ranks included


def batches_of(
    samples: Sequence[Sample],
    tokens_per_batch: int,
    policy: Policy,
    ranks: Ranks = SINGLE_RANK,
    num_parallel: int = 1,
    *,
    environment: bool = False,
) -> Iterator[Batch]:
    """Pack all samples that have trained tokens, each into one batch, under the token budget.

    With several ranks, yields the batches of this rank. Batches that are computed at once share
    the budget. environment: see `pack`.
    """
    trained = [sample for sample in samples if any(sample.loss_mask)]
    share = policy.packs_rows and prefix_reuse_fraction(trained) >= MIN_REUSE_FRACTION
    budget, num_parts = tokens_per_batch // num_parallel, ranks.size * num_parallel
    rows = split_by_budget(trained, budget, share=share, num_ranks=num_parts)
    for indices, counts in ranks.assign_rows(rows):
        part = [trained[index] for index in indices]
        batch = pack(part, share=share, device=policy.device, environment=environment)
        yield batch if counts else dataclasses.replace(batch, counts=False)
