"""The random number generators of a process, seeded anew for each step.

So a step draws the same numbers whatever was drawn before it: a run that goes on from a
checkpoint needs no state of theirs, and an evaluation in between changes nothing. Sampling and
tasks have numbers of their own, from hashes; dropout has these, and what users write may.

Refused here: promises about code that draws from Python's generator while sessions are open.
Their keep-alive pings draw from it too, by the clock.
"""

import hashlib
import random

import numpy as np
import torch


def seed_step(seed: int, stage: str, step: int) -> None:
    """Python's, numpy's and torch's own generators start from the run's seed and the step."""
    digest = hashlib.sha256(f"{seed}/{stage}/{step}".encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
