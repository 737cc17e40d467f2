"""Scripted policies for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here an action.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

_TEN_OR_ACE = "TJQKA"


def basic_strategy(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Play the usual table of hit or stand, by the player's total and the dealer's card."""
    hand = observations[-1]
    rank = hand["dealer_card"][1]
    if hand["soft"]:
        stand_from = 19 if rank == "9" or rank in _TEN_OR_ACE else 18
    elif rank in "456":
        stand_from = 12
    else:
        stand_from = 13 if rank in "23" else 17
    return "stand" if hand["total"] >= stand_from else "hit"


def random_action(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Hit or stand, ignoring the cards."""
    return rng.choice(observations[-1]["legal_actions"])
