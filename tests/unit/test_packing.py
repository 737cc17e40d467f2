"""Samples to batches. Trap numbers: tests/README.md."""

import random

import torch
from fakes import made_up_episode, made_up_turn, random_sample, random_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.grpo.packing import collate, split_by_budget
from openenv_pipe.grpo.samples import build_sample

LENGTHS = st.lists(st.integers(1, 50), max_size=20)


@settings(derandomize=True, deadline=None)
@given(LENGTHS, st.integers(1, 200))
def test_batches_hold_every_sample_once_and_keep_the_budget(lengths, budget):
    """Trap 20: padding counted; only a sample that is too long by itself is over the budget."""
    batches = split_by_budget(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[index] for index in batch)
        assert len(batch) * width <= budget or len(batch) == 1


@settings(derandomize=True, deadline=None)
@given(LENGTHS, st.integers(1, 200))
def test_the_same_lengths_give_the_same_batches(lengths, budget):
    assert split_by_budget(lengths, budget) == split_by_budget(list(lengths), budget)


def test_neighbours_in_length_share_a_batch():
    assert split_by_budget([2, 9, 2, 10, 1], 20) == [[3, 1], [0, 2, 4]]


def test_a_sample_is_the_ids_of_its_turns_in_a_row():
    """Trap 8: what the environment wrote has neither loss nor logprob nor advantage."""
    turns = [
        made_up_turn([10, 11], [12, 13], logprobs=[-1.0, -2.0]),
        made_up_turn([14], [15], logprobs=[-3.0]),
    ]
    sample = build_sample("7", made_up_episode(turns=turns), [0.5, -0.5])
    assert sample.group == "7"
    assert sample.token_ids == [10, 11, 12, 13, 14, 15]
    assert sample.loss_mask == [False, False, True, True, False, True]
    assert sample.logprobs == [0.0, 0.0, -1.0, -2.0, 0.0, -3.0]
    assert sample.advantages == [0.0, 0.0, 0.5, 0.5, 0.0, -0.5]


def test_building_a_sample_leaves_the_episode_alone():
    turns = [made_up_turn([10], [11]), made_up_turn([12], [13])]
    episode = made_up_episode(turns=turns)
    build_sample("0", episode, [1.0, 1.0])
    assert [turn.prompt_ids for turn in episode.turns] == [[10], [12]]
    assert [turn.logprobs for turn in episode.turns] == [[-1.0], [-1.0]]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_a_batch_holds_its_samples_and_padding_without_loss(seed):
    """Trap 9."""
    samples = random_samples(seed)
    batch = collate(samples)
    assert batch.loss_mask.dtype == torch.bool
    assert not batch.loss_mask[:, 0].any()
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        assert batch.token_ids[row, :length].tolist() == sample.token_ids
        assert batch.loss_mask[row, :length].tolist() == sample.loss_mask
        assert torch.equal(batch.logprobs[row, :length], torch.tensor(sample.logprobs))
        assert torch.equal(batch.advantages[row, :length], torch.tensor(sample.advantages))
        assert not batch.loss_mask[row, length:].any()


def test_an_end_token_that_looks_like_padding_keeps_its_loss():
    """Trap 19: padding is known by the mask, not by its id; here the end token is 0 as well."""
    long = random_sample(random.Random(0), [(2, 8)])
    turns = [made_up_turn([5, 6], [7, 0]), made_up_turn([8], [0])]
    ended = build_sample("0", made_up_episode(turns=turns), [1.0, 1.0])
    batch = collate([long, ended])
    trained = batch.token_ids[1][batch.loss_mask[1]]
    assert trained.tolist() == [7, 0, 0]
