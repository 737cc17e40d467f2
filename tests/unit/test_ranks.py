"""How the samples of an update are split over ranks. integration/test_sharding tests their
results."""

from fakes import alike_samples, random_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.algorithms.packing import split_by_budget
from openenv_pipe.learner.ranks import Ranks


@settings(derandomize=True, deadline=None, max_examples=50)
@given(num_rows=st.integers(0, 20), size=st.integers(1, 6))
def test_each_row_counts_once_and_all_ranks_get_equally_many(num_rows, size):
    rows = list(range(num_rows))
    dealt = [Ranks(rank, size).assign_rows(rows) for rank in range(size)]
    assert sorted(row for part in dealt for row, counts in part if counts) == rows
    assert len({len(part) for part in dealt}) == 1
    assert sum(not counts for part in dealt for _, counts in part) < size


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), share=st.booleans())
def test_ranks_get_about_the_same_number_of_tokens(seed, size, share):
    """Without shared prefixes, no rank exceeds the mean by more than one sample per row."""
    samples = (alike_samples if share else random_samples)(seed, count=40)
    lengths = [len(sample.token_ids) for sample in samples]
    rows = split_by_budget(samples, 400, share=share, num_ranks=size)
    assert sorted(index for row in rows for index in row) == list(range(len(samples)))
    if not share:
        loads = [
            sum(lengths[index] for row in rows[rank::size] for index in row) for rank in range(size)
        ]
        most_rows = -(-len(rows) // size)
        assert max(loads) <= sum(loads) / size + most_rows * max(lengths)
