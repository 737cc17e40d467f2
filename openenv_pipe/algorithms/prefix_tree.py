"""Samples as a trie, in which a prefix that several samples share is stored and computed once.

The row holds the trie's nodes depth first, so that all descendants of a node follow it without a
gap: token q of the row attends to token k exactly if k <= q < the end of k's subtree. Only token
ids matter, not groups: a system prompt is shared by all samples.

Shape letters: T tokens of the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from openenv_pipe.algorithms.batch import Node

Ids = np.ndarray  # token ids of one sample, int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Trie:
    """Samples in one row of tokens."""

    token_ids: Ids  # [T]
    nodes: list[Node]  # depth first
    paths: list[list[int]]  # of each sample: its nodes, from the root


def sorted_rows(rows: Sequence[Ids]) -> list[int]:
    """Return the indices of rows in lexicographic order, so that equal prefixes are neighbours."""
    return sorted(range(len(rows)), key=lambda index: (rows[index].tolist(), index))


def common_prefix(one: Ids | Sequence[int], other: Ids | Sequence[int]) -> int:
    """Return the length of the prefix that two rows share, in tokens."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differing[0]) if len(differing) else length


def flat(rows: Sequence[Ids]) -> Trie:
    """Build a trie that shares no prefixes: one node per row."""
    ends = np.cumsum([len(row) for row in rows]).tolist()
    starts = [0, *ends[:-1]]
    nodes = [
        Node(start=start, end=end, subtree_end=end, depth=0, parent=-1)
        for start, end in zip(starts, ends, strict=True)
    ]
    return Trie(
        token_ids=np.concatenate(rows), nodes=nodes, paths=[[index] for index in range(len(rows))]
    )


def merged(rows: Sequence[Ids]) -> Trie:
    """Build the trie of the rows. A row that is a prefix of another ends at an inner node."""
    order = sorted_rows(rows)
    builder = _Builder([rows[index] for index in order])
    paths: list[list[int]] = [[] for _ in rows]
    for index, path in zip(order, builder.paths, strict=True):
        paths[index] = path
    return Trie(token_ids=np.concatenate(builder.parts), nodes=builder.nodes, paths=paths)


# (first row, one past the last, depth, parent), or the number of a node to close
Stack = list[tuple[int, int, int, int] | int]


class _Builder:
    """Builds a trie from sorted rows, with an explicit stack because tries may be very deep."""

    def __init__(self, rows: Sequence[Ids]) -> None:
        self.nodes: list[Node] = []
        self.parts: list[Ids] = []
        self.paths: list[list[int]] = [[] for _ in rows]
        self._rows = rows
        self._next = [common_prefix(one, other) for one, other in pairwise(rows)]
        self._length = 0
        self._build()

    def _build(self) -> None:
        stack: Stack = []
        self._push_branches(stack, 0, len(self._rows), 0, -1)
        while stack:
            task = stack.pop()
            if isinstance(task, int):
                self.nodes[task].subtree_end = self._length
                continue
            first, last, depth, parent = task
            # Rows are sorted: all of them share the prefix that the first and the last share.
            until = min([*self._next[first : last - 1], len(self._rows[first])])
            number = self._open(first, last, depth, until, parent)
            stack.append(number)
            while first < last and len(self._rows[first]) == until:
                first += 1
            self._push_branches(stack, first, last, until, number)

    def _open(self, first: int, last: int, depth: int, until: int, parent: int) -> int:
        number = len(self.nodes)
        end = self._length + until - depth
        self.nodes.append(
            Node(start=self._length, end=end, subtree_end=end, depth=depth, parent=parent)
        )
        self.parts.append(self._rows[first][depth:until])
        self._length = end
        for row in range(first, last):
            self.paths[row].append(number)
        return number

    def _push_branches(self, stack: Stack, first: int, last: int, depth: int, parent: int) -> None:
        """Push a task per stretch of rows with an equal token at `depth`, the first one on top."""
        starts = [row for row in range(first, last) if row == first or self._next[row - 1] <= depth]
        for start, end in reversed(list(pairwise([*starts, last]))):
            stack.append((start, end, depth, parent))
