"""What a worker of a server remembers of the runs that use it; see `engines/vllm/ownership.py`.

vLLM's workers import this file as a top-level module, so it imports neither vLLM nor openenv_pipe.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True)
class _Claim:
    name: str
    exclusive: bool
    lease_s: float
    renewed_s: float


class Claims:
    """The claims of one server: a single exclusive one, or any number of others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self._clock = clock
        self._claims: dict[str, _Claim] = {}  # by the ids of their owners

    def claim(self, owner: str, name: str, exclusive: bool, lease_s: float) -> dict[str, Any]:
        """Claim the server for an owner, or renew the claim.

        A claim whose lease has ended gives way to one that it would exclude, and to no other.

        Returns:
            "holder": the name of whoever prevents this claim, empty if nobody does, with
            "silent_s": the seconds since the holder last renewed its claim.
            "is_new": whether the owner had no claim before.
        """
        now = self._clock()
        for other, claim in list(self._claims.items()):
            if other == owner or not (exclusive or claim.exclusive):
                continue
            silent_s = now - claim.renewed_s
            if silent_s < claim.lease_s:
                return {"holder": claim.name, "silent_s": silent_s, "is_new": False}
            del self._claims[other]
        is_new = owner not in self._claims
        self._claims[owner] = _Claim(name=name, exclusive=exclusive, lease_s=lease_s, renewed_s=now)
        return {"holder": "", "silent_s": 0.0, "is_new": is_new}

    def release(self, owner: str) -> None:
        """End the claim of an owner, if there is one."""
        self._claims.pop(owner, None)
