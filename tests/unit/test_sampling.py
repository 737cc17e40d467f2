"""Sampling by random numbers that are functions of seed and counter. Trap numbers:
tests/README.md."""

import numpy as np
import pytest
import torch

from openenv_pipe.engines.sampling import sample, truncated, uniforms

COUNT = 20_000


def numbers(seeds, counters):
    return uniforms(np.asarray(seeds, dtype=np.uint64), np.asarray(counters, dtype=np.uint64))


def assert_uniform(values):
    """Assert that range, mean, variance and a histogram agree within four standard errors."""
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert abs(values.mean() - 1 / 2) < 4 * (1 / 12 / len(values)) ** 0.5
    assert abs(values.var() - 1 / 12) < 4 * (1 / 180 / len(values)) ** 0.5
    share_of_bins = np.histogram(values, bins=20, range=(0, 1))[0] / len(values)
    assert np.abs(share_of_bins - 1 / 20).max() < 4 * (0.05 * 0.95 / len(values)) ** 0.5


def test_uniform_over_the_counters_of_a_seed_and_the_seeds_at_a_counter():
    for seed in (0, 1, 2**63 - 1):
        assert_uniform(numbers([seed] * COUNT, range(COUNT)))
    for counter in (0, 1, 500):
        assert_uniform(numbers(range(COUNT), [counter] * COUNT))


def test_neighbours_are_independent():
    """Trap 24: adjacent counters are not correlated, nor are adjacent seeds."""
    by_counter = numbers([3] * COUNT, range(COUNT))
    by_seed = numbers(range(COUNT), [3] * COUNT)
    for values in (by_counter, by_seed):
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / COUNT**0.5
    assert abs(np.corrcoef(by_counter, by_seed)[0, 1]) < 4 / COUNT**0.5


def test_no_seed_runs_behind_another():
    """Trap 24: the sequences of adjacent seeds share no value, at any offset."""
    rows = [set(numbers([seed] * 1000, range(1000)).tolist()) for seed in range(8)]
    assert len(set.union(*rows)) == 8 * 1000


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_frequencies_are_those_of_the_softmax(temperature):
    """Trap 4."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    ids, logprobs = sample(
        logits.expand(COUNT, -1),
        torch.full((COUNT,), temperature),
        torch.from_numpy(numbers([5] * COUNT, range(COUNT))),
    )
    expected = torch.log_softmax(logits / temperature, dim=-1)
    shares = torch.bincount(ids, minlength=5) / COUNT
    errors = (expected.exp() * (1 - expected.exp()) / COUNT).sqrt()
    assert ((shares - expected.exp()).abs() < 4 * errors).all()
    assert torch.allclose(logprobs, expected[ids], atol=1e-6)


def test_logprobs_of_a_large_vocabulary_are_exact_to_float32():
    """torch.log_softmax of the same logits is wrong by 1e-5."""
    logits = 3 * torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0))
    draws = torch.from_numpy(numbers([1] * 16, range(16)))
    ids, logprobs = sample(logits, torch.ones(16), draws)
    exact = torch.log_softmax(logits.double(), dim=-1).gather(1, ids[:, None])[:, 0]
    assert (logprobs - exact).abs().max() < 2e-6


def test_blocks_of_a_large_vocabulary_give_the_tokens_of_one_running_sum():
    """The last of three blocks is not full; the ends of blocks have a large share."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1300, generator=generator)
    logits[[511, 512, 1023, 1024, 1299]] = 6.0
    draws = torch.from_numpy(numbers([7] * COUNT, range(COUNT)))
    ids, _ = sample(logits.expand(COUNT, -1), torch.ones(COUNT), draws)
    sums = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    expected = torch.searchsorted(sums, draws * sums[-1], right=True)
    assert (ids != expected).sum() <= 2  # by rounding, at the edge between two tokens
    assert len(ids.unique()) > 500


@pytest.mark.parametrize("block", [1, 512])
def test_an_impossible_token_is_never_drawn(block):
    """Neither the smallest nor the largest uniform number draws it, also in several blocks."""
    logits = torch.full((5 * block,), -torch.inf)
    logits[[block, 3 * block]] = 0.0
    edges = torch.tensor([0.0, 1e-300, 0.25, 0.5 - 2**-54, 0.5, 0.75, 1 - 2**-53]).double()
    ids, logprobs = sample(logits.expand(len(edges), -1), torch.ones(len(edges)), edges)
    assert set(ids.tolist()) == {block, 3 * block}
    assert torch.isfinite(logprobs).all()


def test_temperature_zero_takes_the_most_likely_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    ids, logprobs = sample(logits, torch.tensor([0.0, 0.0]), torch.tensor([0.1, 0.99]).double())
    assert ids.tolist() == [1, 0]
    assert torch.allclose(logprobs, torch.log_softmax(logits, dim=-1)[[0, 1], [1, 0]])


def test_rows_do_not_depend_on_each_other():
    """Trap 24: a row draws the same token alone and among others."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 50, generator=generator)
    draws = torch.rand(16, generator=generator, dtype=torch.float64)
    together, _ = sample(logits, torch.ones(16), draws)
    alone = [sample(logits[i : i + 1], torch.ones(1), draws[i : i + 1])[0] for i in range(16)]
    assert together.tolist() == torch.cat(alone).tolist()


def test_broken_logits_give_a_token_and_a_logprob_that_says_so():
    """Trap 7: the learner counts logprobs that are not finite; sampling neither hides them nor
    fails."""
    for size in (5, 1300):
        broken = torch.full((2, size), torch.nan)
        ids, logprobs = sample(broken, torch.ones(2), torch.rand(2).double())
        assert ((ids >= 0) & (ids < size)).all()
        assert torch.isnan(logprobs).all()


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, [10, 40, 20, 30]),
        (0.69, 0, [0, 40, 0, 30]),
        (0.71, 0, [0, 40, 20, 30]),
        (1e-9, 0, [0, 40, 0, 0]),
        (1.0, 3, [0, 40, 20, 30]),
        (1.0, 9, [10, 40, 20, 30]),
        (0.7, 3, [0, 40, 0, 30]),  # the first two are 78 % of the three that top_k leaves
    ],
)
def test_truncation_leaves_out_the_least_likely_tokens(top_p, top_k, kept):
    """Trap 6: the logprobs are those of the distribution that is sampled."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().mul(0.5).expand(1000, -1)
    ones = torch.ones(1000)
    logits = truncated(logits, 0.5 * ones, top_p * ones, (top_k * ones).long())
    draws = torch.arange(1000, dtype=torch.float64) / 1000
    ids, logprobs = sample(logits, 0.5 * ones, draws)
    expected = torch.tensor(kept) / sum(kept)
    assert torch.allclose(logprobs, expected.log()[ids])
    assert torch.allclose(torch.bincount(ids, minlength=4) / 1000, expected, atol=2e-3)


def test_a_greedy_row_is_not_truncated():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    zero = torch.zeros(1)
    assert torch.equal(truncated(logits, zero, zero + 0.1, zero.long() + 1), logits)
