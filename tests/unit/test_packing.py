"""Packing samples into rows. Trap numbers: tests/README.md."""

import dataclasses

import numpy as np
import torch
from fakes import alike_samples, made_up_episode, made_up_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.algorithms.packing import (
    num_contexts,
    pack,
    prefix_reuse_fraction,
    split_by_budget,
)
from openenv_pipe.algorithms.prefix_tree import flat, merged
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.types import Sample

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=9)
MANY = settings(derandomize=True, deadline=None)


def arrays(rows):
    return [np.array(row, dtype=np.int64) for row in rows]


def sample_of(row):
    """Return a sample whose last token is trained, so that all tokens before it must be
    computed."""
    length = len(row) + 1
    return Sample(
        group="0",
        member=0,
        num_episode_tokens=1,
        token_ids=[*row, 7],
        loss_mask=[False] * len(row) + [True],
        logprobs=[0.0] * length,
        advantages=[1.0] * length,
    )


def own_tokens(trie, path):
    spans = [trie.token_ids[trie.nodes[n].start : trie.nodes[n].end] for n in path]
    return np.concatenate(spans).tolist()


# --- prefix trees --------------------------------------------------------------------------------


@MANY
@given(ROWS)
def test_a_trie_holds_every_row_and_every_beginning_once(rows):
    trie = merged(arrays(rows))
    beginnings = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert len(trie.token_ids) == len(beginnings)
    for row, path in zip(rows, trie.paths, strict=True):
        assert own_tokens(trie, path) == row


@MANY
@given(ROWS, st.booleans())
def test_nodes_stand_depth_first_and_know_their_place(rows, share):
    """All descendants of a node follow it without a gap, which attention relies on."""
    trie = (merged if share else flat)(arrays(rows))
    assert [node.start for node in trie.nodes[1:]] == [node.end for node in trie.nodes[:-1]]
    for number, node in enumerate(trie.nodes):
        below = [number]
        for other, candidate in enumerate(trie.nodes):
            if candidate.parent in below:
                below.append(other)
        assert node.subtree_end == max(trie.nodes[n].end for n in below)
        above = trie.nodes[node.parent] if node.parent >= 0 else None
        assert node.depth == (above.depth + above.end - above.start if above else 0)


def test_a_thousand_branches_in_a_row_are_no_matter():
    rows = [[1] * length + [2] for length in range(1, 1001)]
    assert len(merged(arrays(rows)).token_ids) == 2000


# --- batches ------------------------------------------------------------------------------------


def size_of(rows, share):
    beginnings = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    return len(beginnings) if share else sum(map(len, rows))


@MANY
@given(ROWS, st.integers(1, 60), st.booleans())
def test_batches_hold_every_sample_once_and_keep_the_budget(rows, budget, share):
    """Trap 20: a batch exceeds the budget only if a single sample is too long. The same samples
    give the same batches."""
    batches, again = (
        split_by_budget(list(map(sample_of, rows)), budget, share=share) for _ in range(2)
    )
    assert batches == again
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        assert size_of([rows[index] for index in batch], share) <= budget or len(batch) == 1


def test_batches_are_of_about_one_size():
    samples = [sample_of([1] * 10) for _ in range(12)]
    assert [len(batch) for batch in split_by_budget(samples, 110, share=False)] == [6, 6]


def test_samples_that_begin_alike_share_a_batch():
    rows = [[tree] * 20 + [member] for member in range(3) for tree in range(2)]
    batches = split_by_budget(list(map(sample_of, rows)), 24, share=True)
    assert sorted(map(sorted, batches)) == [[0, 2, 4], [1, 3, 5]]


@MANY
@given(ROWS)
def test_the_share_is_what_a_trie_saves(rows):
    total = sum(map(len, rows))
    saved = total - len(merged(arrays(rows)).token_ids)
    assert abs(prefix_reuse_fraction(list(map(sample_of, rows))) - saved / total) < 1e-12


# --- samples ------------------------------------------------------------------------------------


def test_a_sample_is_the_ids_of_its_turns_in_a_row_and_leaves_the_episode_alone():
    """Trap 8: the environment's tokens have neither loss nor logprobs nor advantages."""
    turns = [
        made_up_turn([10, 11], [12, 13], logprobs=[-1.0, -2.0]),
        made_up_turn([14], [15], logprobs=[-3.0]),
    ]
    episode = made_up_episode(turns=turns)
    (sample,) = episode_samples("7", episode, [0.5, -0.5])
    assert sample.group == "7"
    assert sample.token_ids == [10, 11, 12, 13, 14, 15]
    assert sample.loss_mask == [False, False, True, True, False, True]
    assert sample.logprobs == [0.0, 0.0, -1.0, -2.0, 0.0, -3.0]
    assert sample.advantages == [0.0, 0.0, 0.5, 0.5, 0.0, -0.5]
    assert [turn.prompt_ids for turn in episode.turns] == [[10, 11], [14]]
    assert [turn.logprobs for turn in episode.turns] == [[-1.0, -2.0], [-3.0]]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.booleans())
def test_a_row_holds_what_its_samples_hold(seed, share):
    """Traps 9 and 25: each trained token occurs once, where attention sees exactly its own
    prefix."""
    samples = alike_samples(seed)
    batch = pack(samples, share=share)
    assert batch.is_shared == share
    assert list(batch.samples) == samples
    start = 0
    for index, sample in enumerate(samples):
        chosen = [place for place, trained in enumerate(sample.loss_mask) if trained]
        own = slice(start, start + len(chosen))
        start += len(chosen)
        assert (batch.sample_index[own] == index).all()
        assert torch.equal(batch.logprobs[own], torch.tensor(sample.logprobs)[chosen])
        assert torch.equal(batch.advantages[own], torch.tensor(sample.advantages)[chosen])
        places = batch.places[own]
        assert batch.targets[places].tolist() == [sample.token_ids[place] for place in chosen]
        for place, predictor in zip(chosen, batch.predictors[places].tolist(), strict=True):
            assert seen_from(batch, predictor) == sample.token_ids[:place]
            assert batch.positions[predictor] == place - 1
    assert start == len(batch.sample_index)
    assert batch.finished.tolist() == sorted(set(batch.predictors.tolist()))
    contexts = [len(seen_from(batch, place)) for place in range(len(batch.token_ids))]
    assert num_contexts(batch.nodes) == sum(contexts)


def seen_from(batch, place):
    """Return the tokens that a position of a row attends to, including itself, by the nodes."""
    (number,) = (n for n, node in enumerate(batch.nodes) if node.start <= place < node.end)
    tokens = batch.token_ids[batch.nodes[number].start : place + 1].tolist()
    while (number := batch.nodes[number].parent) >= 0:
        node = batch.nodes[number]
        tokens = batch.token_ids[node.start : node.end].tolist() + tokens
    return tokens


def test_tokens_that_nothing_needs_are_not_computed():
    """These are the environment's tokens after the last reply, and the last reply's last token."""
    turns = [made_up_turn([5, 6], [7, 8])]
    (sample,) = episode_samples("0", made_up_episode(turns=turns), [1.0])
    longer = dataclasses.replace(
        sample,
        token_ids=[*sample.token_ids, 9, 9],
        loss_mask=[*sample.loss_mask, False, False],
        logprobs=[*sample.logprobs, 0.0, 0.0],
        advantages=[*sample.advantages, 0.0, 0.0],
    )
    assert pack([longer], share=False).token_ids.tolist() == [5, 6, 7]


def test_an_end_token_that_looks_like_padding_keeps_its_loss():
    """Trap 19: no token is treated by its id; here the end token is 0."""
    turns = [made_up_turn([5, 6], [7, 0]), made_up_turn([8], [0])]
    batch = pack(episode_samples("0", made_up_episode(turns=turns), [1.0, 1.0]), share=False)
    assert batch.targets[batch.places].tolist() == [7, 0, 0]
