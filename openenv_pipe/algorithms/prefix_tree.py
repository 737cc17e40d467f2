"""Samples as a trie: tokens that several begin with stand once, and are computed once.

The row holds the trie's nodes depth first, so that everything below a node follows it without a
gap: token q of the row sees token k exactly if k <= q < the end of k's subtree. Pure arithmetic on
token ids: which samples belong to a group plays no part, a system prompt is shared by all.

Shape letters: T tokens of the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from openenv_pipe.types import Node

Ids = np.ndarray  # token ids of one sample, int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Trie:
    """Samples laid out in one row."""

    token_ids: Ids  # [T]
    nodes: list[Node]  # depth first
    paths: list[list[int]]  # of each sample: its nodes, from the root


def sorted_rows(rows: Sequence[Ids]) -> list[int]:
    """Indices of rows, ordered so that those which begin alike are neighbours."""
    return sorted(range(len(rows)), key=lambda index: (rows[index].tolist(), index))


def common_prefix(one: Ids, other: Ids) -> int:
    """How many tokens two rows begin with alike."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def flat(rows: Sequence[Ids]) -> Trie:
    """Every row for itself: a trie without a branch."""
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
    """The trie of the rows. A row that another one begins with ends at an inner node."""
    order = sorted_rows(rows)
    builder = _Builder([rows[index] for index in order])
    paths: list[list[int]] = [[] for _ in rows]
    for index, path in zip(order, builder.paths, strict=True):
        paths[index] = path
    return Trie(token_ids=np.concatenate(builder.parts), nodes=builder.nodes, paths=paths)


# (first row, one past the last, depth, parent), or the number of a node to close
Stack = list[tuple[int, int, int, int] | int]


class _Builder:
    """Walks sorted rows; an explicit stack, for a thousand rows may branch one after the other."""

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
            # Rows are sorted: what the first and the last share, all between them share.
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
        """One task for each run of rows that agree on their token at `depth`; the first on top."""
        starts = [row for row in range(first, last) if row == first or self._next[row - 1] <= depth]
        for start, end in reversed(list(pairwise([*starts, last]))):
            stack.append((start, end, depth, parent))
