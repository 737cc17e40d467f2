"""Samples to batches under a token budget. Shape letters: B rows, T columns."""

from collections.abc import Sequence

import torch

from openenv_pipe.types import Batch, Sample


def split_by_budget(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Indices of samples, in batches of at most `tokens_per_batch` tokens with padding counted.

    Neighbours in length share a batch, so that little is padded. A sample that is longer than
    the budget gets a batch of its own: leaving it out would bias the run towards short episodes.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens_per_batch:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def collate(samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
    """Pads samples on the right to one width. Padding is token 0 and carries no loss."""
    width = max(len(sample.token_ids) for sample in samples)

    def padded(rows: list[list], dtype: torch.dtype) -> torch.Tensor:
        filled = [row + [0] * (width - len(row)) for row in rows]
        return torch.tensor(filled, dtype=dtype, device=device)

    return Batch(
        token_ids=padded([sample.token_ids for sample in samples], torch.int64),
        loss_mask=padded([sample.loss_mask for sample in samples], torch.bool),
        logprobs=padded([sample.logprobs for sample in samples], torch.float32),
        advantages=padded([sample.advantages for sample in samples], torch.float32),
    )
