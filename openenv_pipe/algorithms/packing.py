"""Pack samples into batches under a token budget, without padding; prefixes may be shared.

Shape letters: T tokens of a batch's row, N trained tokens, U of them to compute, from F tokens.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from openenv_pipe.algorithms.batch import Batch, Node
from openenv_pipe.algorithms.prefix_tree import Ids, common_prefix, flat, merged, sorted_rows
from openenv_pipe.types import Sample


def prefix_reuse_fraction(samples: Sequence[Sample]) -> float:
    """Return the fraction of tokens saved by reusing shared prefixes."""
    rows = _rows(samples)
    order = sorted_rows(rows)
    shared = sum(common_prefix(rows[one], rows[other]) for one, other in pairwise(order))
    return shared / max(1, sum(map(len, rows)))


def split_by_budget(
    samples: Sequence[Sample], tokens_per_batch: int, *, share: bool, num_ranks: int = 1
) -> list[list[int]]:
    """Split samples into batches of about equal size, at most `tokens_per_batch` tokens each.

    Returns the indices of each batch's samples. A sample longer than the budget gets its own batch,
    because leaving it out would bias the run towards short episodes. Samples of similar length, or
    with `share` of equal prefix, share a batch. All `num_ranks` ranks get the same number of
    batches, if there are enough samples.
    """
    if not samples:
        return []
    rows = _rows(samples)
    if share:
        order = sorted_rows(rows)
        shared = [0] + [common_prefix(rows[one], rows[other]) for one, other in pairwise(order)]
    else:
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index]), index))
        shared = [0] * len(rows)
    lengths = [len(rows[index]) for index in order]
    parts = _parts(lengths, shared, tokens_per_batch, num_ranks)
    return [sorted(order[place] for place in part) for part in parts]


def _parts(lengths: list[int], shared: list[int], budget: int, num_ranks: int) -> list[list[int]]:
    """Cut the rows into as few parts as budget and ranks allow; minimise the largest part."""

    def cut(limit: int) -> list[list[int]]:
        parts: list[list[int]] = []
        size = 0
        for place, (length, known) in enumerate(zip(lengths, shared, strict=True)):
            if parts and size + length - known <= limit:
                parts[-1].append(place)
                size += length - known
            else:
                parts.append([place])
                size = length
        return parts

    fewest = -(-len(cut(budget)) // num_ranks) * num_ranks
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= fewest else (middle + 1, high)
    return cut(high)


def pack(
    samples: Sequence[Sample],
    *,
    share: bool,
    device: torch.device | str = "cpu",
    environment: bool = False,
) -> Batch:
    """Pack samples into one row, each up to the last token that predicts a trained one.

    environment: the environment's tokens are predicted as well
    """
    rows = _rows(samples)
    assert all(map(len, rows)), "a sample without trained tokens"
    trie = (merged if share else flat)(rows)
    places, targets, sample_index, logprobs, advantages = [], [], [], [], []
    episode_tokens: list[np.ndarray] = []
    answers: list[tuple[np.ndarray, np.ndarray]] = []  # predictors and targets of the environment's
    for index, (sample, path) in enumerate(zip(samples, trie.paths, strict=True)):
        chosen = np.flatnonzero(sample.loss_mask)
        assert chosen[0] > 0, "nothing predicts the first token of a sample"
        spans = [np.arange(trie.nodes[n].start, trie.nodes[n].end) for n in path]
        row, token_ids = np.concatenate(spans), np.asarray(sample.token_ids, dtype=np.int64)
        places.append(row[chosen - 1])
        targets.append(token_ids[chosen])
        answered = np.flatnonzero(sample.environment_mask if environment else [])
        answered = answered[answered < chosen[-1]]
        answers.append((row[answered - 1], token_ids[answered]))
        sample_index.append(np.full(len(chosen), index))
        episode_tokens.append(np.full(len(chosen), sample.num_episode_tokens, dtype=np.float32))
        logprobs.append(np.asarray(sample.logprobs, dtype=np.float32)[chosen])
        advantages.append(np.asarray(sample.advantages, dtype=np.float32)[chosen])
    num_trained = sum(map(len, targets))
    predictors = np.concatenate([*places, *(each for each, _ in answers)])  # [N + E]
    predicted = np.concatenate([*targets, *(each for _, each in answers)])
    base = predicted.max() + 1
    pairs_U, pairs = np.unique(predictors * base + predicted, return_inverse=True)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Batch(
        token_ids=tensor(trie.token_ids),
        positions=tensor(
            np.concatenate([n.depth + np.arange(n.end - n.start) for n in trie.nodes])
        ),
        nodes=trie.nodes,
        predictors=tensor(pairs_U // base),
        targets=tensor(pairs_U % base),
        finished=tensor(np.unique(predictors)),
        places=tensor(pairs[:num_trained]),
        environment_places=tensor(pairs[num_trained:]) if environment else None,
        samples=tuple(samples),
        sample_index=tensor(np.concatenate(sample_index)),
        episode_tokens=tensor(np.concatenate(episode_tokens)),
        logprobs=tensor(np.concatenate(logprobs)),
        advantages=tensor(np.concatenate(advantages)),
        is_shared=share,
    )


def num_contexts(nodes: Sequence[Node]) -> int:
    """Sum over a row's tokens how many tokens each attends to, itself included."""
    lengths = ((node, node.end - node.start) for node in nodes)
    return sum(length * node.depth + length * (length + 1) // 2 for node, length in lengths)


def _rows(samples: Sequence[Sample]) -> list[Ids]:
    """Return each sample's tokens before its last trained one; later tokens predict nothing."""
    rows = []
    for sample in samples:
        chosen = np.flatnonzero(sample.loss_mask)
        last = int(chosen[-1]) if len(chosen) else 0
        rows.append(np.asarray(sample.token_ids[:last], dtype=np.int64))
    return rows
