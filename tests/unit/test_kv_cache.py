"""The ragged cache against forward passes without a cache."""

import gc
import random
import weakref

import pytest
import torch
from fakes import tiny_policy

from openenv_pipe.models.kv_cache import RaggedCache


class Grower:
    """Feeds random tokens to rows of a cache and compares hidden states with an uncached pass."""

    def __init__(self, seed: int) -> None:
        self.policy = tiny_policy()
        self.cache = RaggedCache(self.policy.num_layers)
        self.rows: list[list[int]] = []
        self._draw = random.Random(seed)

    def add_rows(self, count: int) -> None:
        self.cache.add_rows(count)
        self.rows += [[] for _ in range(count)]

    @torch.no_grad()
    def feed(self, lengths: list[int], cache: RaggedCache | None = None) -> None:
        """Give row r lengths[r] new tokens and compare their hidden states."""
        starts = [len(row) for row in self.rows]
        new = [[self._draw.randrange(5, 250) for _ in range(length)] for length in lengths]
        width = max(lengths)
        token_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in new])
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        cache = self.cache if cache is None else cache
        mask = cache.write_at(positions)
        hidden = self.policy.hidden(token_ids, positions, mask, cache)
        for row, ids in enumerate(new):
            self.rows[row] += ids
            if ids:
                self._check(row, starts[row], hidden[row, : len(ids)])

    def _check(self, row: int, start: int, seen: torch.Tensor) -> None:
        expected = self.policy.hidden(torch.tensor([self.rows[row]]))[0, start:]
        assert (seen - expected).abs().max() < 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_different_lengths_equal_plain_forward_passes(seed):
    """The cache grows several times, and some rows get no tokens in a step."""
    draw = random.Random(seed)
    grower = Grower(seed)
    grower.add_rows(4)
    for _ in range(12):
        grower.feed([draw.randrange(1, 25), *(draw.randrange(25) for _ in range(3))])
    assert grower.cache.capacity > 64


def test_rows_can_be_added_later():
    grower = Grower(0)
    grower.add_rows(2)
    grower.feed([5, 70])
    grower.add_rows(2)
    grower.feed([1, 1, 9, 3])
    grower.feed([2, 1, 1, 4])


def test_rows_can_be_dropped_and_reordered():
    grower = Grower(0)
    grower.add_rows(4)
    grower.feed([5, 9, 2, 7])
    grower.cache = grower.cache.copy_rows(torch.tensor([3, 1]))
    grower.rows = [grower.rows[3], grower.rows[1]]
    grower.feed([3, 4])
    grower.add_rows(1)
    grower.feed([1, 2, 3])


@pytest.mark.parametrize("extra", [3, 90])
def test_a_part_can_go_on_alone_and_come_back(extra):
    """The copied rows may exceed the cache's capacity in the meantime."""
    grower = Grower(0)
    grower.add_rows(4)
    grower.feed([5, 9, 2, 7])
    index = torch.tensor([1, 3])
    part, everyone = grower.cache.copy_rows(index), grower.rows
    grower.rows = [everyone[1], everyone[3]]
    grower.feed([extra, 1], cache=part)
    grower.feed([1, extra], cache=part)
    grower.cache.put_rows(index, part)
    grower.rows = everyone
    grower.feed([2, 3, 4, 1])


def test_a_copy_does_not_share_memory():
    grower = Grower(0)
    grower.add_rows(2)
    grower.feed([4, 4])
    copy = grower.cache.copy_rows(torch.tensor([0, 1]))
    before = grower.cache.layers[0].keys.clone()
    copy.layers[0].keys.zero_()
    assert torch.equal(grower.cache.layers[0].keys, before)


def test_no_rows_can_be_kept():
    """All episodes have ended before new ones begin."""
    grower = Grower(0)
    grower.add_rows(2)
    grower.feed([4, 2])
    grower.cache = grower.cache.copy_rows(torch.tensor([], dtype=torch.int64))
    grower.rows = []
    grower.add_rows(3)
    grower.feed([1, 2, 3])


def test_a_cache_that_nobody_uses_is_freed_without_the_garbage_collector():
    """A reference cycle would keep the tensors of a whole collection in memory for a while."""
    grower = Grower(0)
    grower.add_rows(2)
    grower.feed([3, 5])
    copy = grower.cache.copy_rows(torch.tensor([0]))
    seen = [weakref.ref(each) for cache in (grower.cache, copy) for each in (cache, *cache.layers)]
    keys = [weakref.ref(layer.keys) for layer in grower.cache.layers]
    gc.disable()
    try:
        del copy, grower.cache
        assert [each() for each in (*seen, *keys)] == [None] * len(seen + keys)
    finally:
        gc.enable()
