"""A rate limit per minute that all requests share."""

import asyncio
import time


class RateLimit:
    """A budget that grows by `per_minute` each minute, up to that amount; None: no limit.

    It may be overdrawn: then the next caller waits until it is balanced.
    """

    def __init__(self, per_minute: int | None) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute or 0)
        self._filled_at = time.monotonic()

    async def take(self, amount: float) -> None:
        """Take an amount, and wait as long as the budget is overdrawn."""
        if self._per_minute is None:
            return
        now = time.monotonic()
        filled = (now - self._filled_at) * self._per_minute / 60
        self._left = min(float(self._per_minute), self._left + filled) - amount
        self._filled_at = now
        if self._left < 0:
            await asyncio.sleep(-self._left * 60 / self._per_minute)
