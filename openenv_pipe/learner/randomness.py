"""The random number generators of a process: seeded, written down, brought back.

Sampling, tasks and seeds draw from hashes and need none of this. Dropout does, and what users
write may. Refused here: generators that somebody made for himself.
"""

import base64
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's own generators start from the run's seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Where they stand, as JSON."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": _pack(torch.get_rng_state()),
        "cuda": [_pack(state) for state in cuda],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Puts them where they stood. GPUs beyond those that are here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_unpack(state["torch"]))
    for number, packed in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_unpack(packed), number)


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Whatever is drawn inside, outside nothing was: an evaluation changes no training."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def _pack(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
