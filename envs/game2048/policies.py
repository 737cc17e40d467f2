"""Scripted policies for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here a move.
"""

import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .rules import Board, empty_cells, legal_moves, move, put

# A path through the cells from one corner. The best boards have their largest tiles at its start.
_SNAKE = (
    (2**15, 2**14, 2**13, 2**12),
    (2**8, 2**9, 2**10, 2**11),
    (2**7, 2**6, 2**5, 2**4),
    (2**0, 2**1, 2**2, 2**3),
)


def expectimax(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return the move with the best mean value after one reply, over all cells for a new 2.

    A board's value is highest with large tiles first along a snake from the upper left corner.
    A move takes some milliseconds to compute.
    """
    board = tuple(map(tuple, observations[-1]["board"]))
    return max(legal_moves(board), key=lambda direction: _expected(move(board, direction)[0]))


def random_move(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a random legal move."""
    return rng.choice(observations[-1]["legal_actions"])


def _expected(board: Board) -> float:
    """Return the value of the best reply to a new 2, as the mean over the empty cells."""
    return fmean(_value_of_best_reply(put(board, cell, 2)) for cell in empty_cells(board))


def _value_of_best_reply(board: Board) -> float:
    return max((_value(move(board, reply)[0]) for reply in legal_moves(board)), default=0.0)


def _value(board: Board) -> float:
    return sum(
        tile * weight
        for tiles, weights in zip(board, _SNAKE, strict=True)
        for tile, weight in zip(tiles, weights, strict=True)
    )
