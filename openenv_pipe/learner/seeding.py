"""What makes steps repeatable: deterministic kernels, and generators seeded anew for each step.

A step therefore draws the same numbers whatever was drawn before it: checkpoints need not store
generator state, and an evaluation between steps changes nothing. Dropout and user code use these
generators; sampling and tasks derive their seeds from hashes.

Code that draws from Python's generator while sessions are open is not reproducible, because their
keep-alive pings draw from it too, at times that the clock decides.
"""

import hashlib
import random

import numpy as np
import torch

from openenv_pipe.system.process_settings import keep_freed_memory


def use_deterministic_kernels() -> None:
    """Let torch use deterministic kernels in this process, where it has them."""
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    # Else torch also fills each new tensor with NaN. No code here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def prepare_thread(num_threads: int) -> None:
    """Make torch deterministic in this thread: fixed number of threads, deterministic kernels."""
    torch.set_num_threads(num_threads)
    use_deterministic_kernels()
    keep_freed_memory()


def seed_step(seed: int, stage: str, step: int) -> None:
    """Seed the generators of Python, numpy and torch from run seed, stage and step."""
    digest = hashlib.sha256(f"{seed}/{stage}/{step}".encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
