"""The engine's replies to one episode, which can be given once more to another worker."""

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any

from openenv_pipe.engines.base import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    digest: bytes  # of the request; whole requests would hold every prompt of the episode
    reply: asyncio.Task[Any]


class EpisodeReplies:
    """Answers an episode's requests with the engine, and remembers the answers.

    After `repeat` the episode is played again from its reset: requests that equal the remembered
    ones get the same replies, without the engine. A deterministic environment therefore ends with
    the episode that the lost worker would have returned. In another one, the engine replies from
    the first request that differs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._exchanges: list[_Exchange] = []
        self._place = 0

    def repeat(self) -> None:
        """Expect the episode's requests again, from the first one on."""
        self._place = 0

    async def settle(self) -> None:
        """Wait for the replies that were asked for: the engine is told of an episode's end last."""
        if pending := [exchange.reply for exchange in self._exchanges if not exchange.reply.done()]:
            await asyncio.wait(pending)

    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.reply.cancel()

    async def reply(self, request: Any) -> Any:
        """Return the reply to the episode's next request. Raises EngineError and ConfigError."""
        digest = hashlib.sha256(repr(request).encode(errors="surrogatepass")).digest()
        remembered = self._exchanges[self._place :]
        if remembered and remembered[0].digest != digest:
            # The engine batches all requests of an episode, and still has those of a lost worker.
            await self.settle()
            del self._exchanges[self._place :]
        if self._place == len(self._exchanges):
            reply = asyncio.create_task(self._engine.generate(request))
            reply.add_done_callback(_observe)
            self._exchanges.append(_Exchange(digest=digest, reply=reply))
        exchange = self._exchanges[self._place]
        self._place += 1
        return await asyncio.shield(exchange.reply)


def _observe(reply: asyncio.Task[Any]) -> None:
    """Take note of an error, which `reply` raises too unless the episode was cancelled."""
    if not reply.cancelled():
        reply.exception()
