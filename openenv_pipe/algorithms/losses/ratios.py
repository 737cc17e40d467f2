"""Probability ratios of tokens and of samples. Shape letter: N trained tokens of a batch."""

import torch

MAX_LOG_RATIO = 20.0  # e^20 is 5e8: beyond any clip, and its square is still finite in float32


def ratios(log_ratios_N: torch.Tensor) -> torch.Tensor:
    """Return exp of the log ratios, clamped so that it is finite; clamped ones have no gradient."""
    return torch.exp(log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sample_sums(values_N: torch.Tensor, sample_index_N: torch.Tensor) -> torch.Tensor:
    """Return for each token [N] the sum over its sample."""
    num_samples = int(sample_index_N.max()) + 1 if len(sample_index_N) else 0
    sums = torch.zeros(num_samples, dtype=values_N.dtype, device=values_N.device)
    return sums.index_add(0, sample_index_N, values_N)[sample_index_N]


def sample_means(values_N: torch.Tensor, sample_index_N: torch.Tensor) -> torch.Tensor:
    """Return for each token [N] the mean over its sample."""
    counts_N = sample_sums(torch.ones_like(values_N), sample_index_N)
    return sample_sums(values_N, sample_index_N) / counts_N
