"""Rate limits: so many a minute, spread evenly, whoever asks."""

import asyncio
import time


class RateLimit:
    """A budget that fills up by `per_minute` a minute, and holds a minute's worth at most.

    What is taken beyond it is owed: the next to ask waits until the debt is paid.
    """

    def __init__(self, per_minute: int | None) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute or 0)
        self._filled_at = time.monotonic()

    async def take(self, amount: float) -> None:
        """Waits for its turn, at most as long as what was taken before it takes to fill up."""
        if self._per_minute is None:
            return
        now = time.monotonic()
        filled = (now - self._filled_at) * self._per_minute / 60
        self._left = min(float(self._per_minute), self._left + filled) - amount
        self._filled_at = now
        if self._left < 0:
            await asyncio.sleep(-self._left * 60 / self._per_minute)
