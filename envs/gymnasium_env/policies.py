"""A scripted policy for baselines, warm starts and tests.

A policy is called with all observations of the episode so far, as plain dicts, and a
`random.Random`. It returns the text that a model would write, here an action.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any


def random_action(observations: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a random legal action of an environment with few discrete actions."""
    return str(rng.choice(observations[-1]["legal_actions"]))
