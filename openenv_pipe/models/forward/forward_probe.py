"""The rows that a model's forward passes are compared on, and the calls that sample them.

The rows have different lengths and a common beginning, and are sampled in two turns, between which
one of them is done early, and another one goes back to an earlier token. They cross a sliding
window, or the end of a chunk, and have more tokens than sparse attention chooses, where the model
has these and episodes may be as long.

Shape letters: K places that are compared, V vocabulary.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from openenv_pipe.models.policy import Policy

NUM_TOKENS = 40  # of the longest row, or fewer if the model has fewer positions
RECURRENT_TOKENS = 160  # recurrent layers compute in chunks of 64, which only code may name
# Attention takes the square of a row's tokens of memory. Most long windows have 4,096 tokens: rows
# of 8,212 took 7 to 18 seconds and 21 to 27 GiB on an H200, with models of 2 and 7 billion weights.
MAX_TOKENS = 8232
SAFE_TOKENS = 4608  # They still cross such a window, with a third of the memory.
MIN_TOKENS = 16
SMALL_ID = 41  # ids below it are ordinary tokens of every vocabulary
# What configurations call the tokens of a window or chunk, or the number that attention chooses.
SPANS = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size"),
    *("keep_window_size", "local_attention", "attention_chunk_size", "chunk_size"),
    *("mamba_chunk_size", "block_size", "index_topk"),
)
NUM_STEPS = 3  # in which all rows get a token


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the forward pass: each of these rows, in this order, gets tokens up to its end."""

    order: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    is_step: bool


@dataclass(frozen=True, slots=True)
class ForwardProbe:
    """Rows of token ids, and the calls that sample them."""

    rows: list[list[int]]
    calls: list[_Call]

    def ends_by_row(self) -> list[list[int]]:
        """Return, for each row, after how many tokens each of its calls gives logits."""
        ends: list[list[int]] = [[] for _ in self.rows]
        for call in self.calls:
            for row, end in zip(call.order, call.ends, strict=True):
                ends[row].append(end)
        return ends

    def in_order_of_calls(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [K, V] from the rows' values at `ends_by_row`."""
        iterators = [iter(values) for values in rows]
        return torch.stack([next(iterators[row]) for call in self.calls for row in call.order])

    def turns(self) -> list[slice]:
        """Return the places [K] of each turn: a call that is not a step begins one."""
        counts: list[int] = []
        for call in self.calls:
            counts += [] if call.is_step else [0]
            counts[-1] += len(call.order)
        ends = list(itertools.accumulate(counts))
        return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def sample(self, policy: Policy) -> torch.Tensor:
        """Return the logits [K, V] of the engine's forward pass."""
        (forward,) = policy.row_forwards(1)
        forward.reserve_rows(len(self.rows))
        order, logits = self.calls[0].order, []
        for call in self.calls:
            if call.order != order[: len(call.order)]:
                goal = [*call.order, *(row for row in order if row not in call.order)]
                moved = [index for index, row in enumerate(goal) if row != order[index]]
                forward.copy_rows([order.index(goal[index]) for index in moved], moved)
                order = goal
            new = [
                self.rows[r][a:b]
                for r, a, b in zip(call.order, call.starts, call.ends, strict=True)
            ]
            if call.is_step:
                ids = torch.tensor([token_id for (token_id,) in new], device=policy.device)
                starts = torch.tensor(call.starts, device=policy.device)
                logits.append(forward.step(ids, starts))
            else:
                logits.append(forward.feed(new, call.starts))
        return torch.cat(logits)


def is_recurrent(policy: Policy) -> bool:
    """Return whether the model has layers that keep a state instead of keys and values.

    transformers does not say so of convolutions, as in LFM2, and of MiniMax's linear attention.
    """
    kinds = getattr(policy.model.config.get_text_config(), "layer_types", None) or ()
    is_stateful = bool(getattr(policy.model, "_is_stateful", False))
    return is_stateful or not {"conv", "linear_attention"}.isdisjoint(kinds)


def longest_span(policy: Policy, max_tokens: int | None) -> int:
    """Return how many tokens the longest window or chunk has; 0 if rows never cross one.

    max_tokens: of an episode; what happens in longer rows does not matter.
    """
    config: Any = policy.model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in SPANS]
    limit = _longest_row(policy, max_tokens)
    return max((size for size in sizes if type(size) is int and size < limit), default=0)


def probe_length(policy: Policy, max_tokens: int | None) -> int:
    """Return how many tokens the longest row has: more than two of the model's spans."""
    length = max(NUM_TOKENS, 2 * longest_span(policy, max_tokens) + NUM_TOKENS // 2)
    if is_recurrent(policy):
        length = max(length, RECURRENT_TOKENS)
    return max(MIN_TOKENS, min(length, _longest_row(policy, max_tokens)))


def _longest_row(policy: Policy, max_tokens: int | None) -> int:
    limits = [each for each in (policy.max_length, max_tokens) if each is not None]
    return min(limits, default=sys.maxsize)


def build_probe(length: int) -> ForwardProbe:
    """Build three rows, the longest of this length; the others begin as it does."""
    draw = torch.Generator().manual_seed(0)
    lengths = [length, length * 5 // 8, length * 7 // 8]
    shared = torch.randint(1, SMALL_ID, (length // 4,), generator=draw).tolist()
    rows = [
        shared + torch.randint(1, SMALL_ID, (each - len(shared),), generator=draw).tolist()
        for each in lengths
    ]
    tail = length // 8
    done = [each - 2 * NUM_STEPS - tail for each in lengths]
    calls = [_Call([0, 1, 2], [0, 0, 0], list(done), False)]

    def steps(order: list[int], number: int) -> None:
        for _ in range(number):
            starts = [done[row] for row in order]
            calls.append(_Call(order, starts, [start + 1 for start in starts], True))
            for row in order:
                done[row] += 1

    steps([0, 1, 2], NUM_STEPS)
    steps([2, 1], 1)  # Row 0 is done, and changes places with the last one.
    starts = [done[2] - 2, done[1], done[0]]
    ends = [lengths[row] - 1 for row in (2, 1, 0)]
    calls.append(_Call([2, 1, 0], starts, ends, False))
    done = [lengths[row] - 1 for row in range(3)]
    steps([2, 1, 0], 1)
    return ForwardProbe(rows, calls)
