"""Scripted policies for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here a move.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any


def perfect(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Move to the ball's column, then stay. This catches every ball."""
    ball, paddle = observations[-1]["ball_column"], observations[-1]["paddle_column"]
    if ball == paddle:
        return "stay"
    return "left" if ball < paddle else "right"


def random_move(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a random move, ignoring the ball."""
    return rng.choice(observations[-1]["legal_actions"])
