"""Scripted policies for opponents, baselines, warm starts and tests.

A policy is called with the observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here the number of a cell. It plays
for whoever is to move.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from .rules import best_moves, has_won, put


def perfect(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a random one of the moves that a perfect opponent cannot punish."""
    return rng.choice(best_moves(observations[-1]["board"], observations[-1]["turn"]))


def random_move(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a random legal move."""
    return rng.choice(observations[-1]["legal_actions"])


def taking_wins(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a move that wins at once where there is one, else a random legal move."""
    board, turn = observations[-1]["board"], observations[-1]["turn"]
    moves = observations[-1]["legal_actions"]
    winning = [move for move in moves if has_won(put(board, move, turn), turn)]
    return rng.choice(winning or moves)
