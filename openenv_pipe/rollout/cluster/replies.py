"""The engine's replies to one episode, which can be given once more to another worker."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from openenv_pipe.engines.base import Completion, Engine, TokenRequest
from openenv_pipe.errors import SessionError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    request: Any
    reply: asyncio.Task[Any]


class EpisodeReplies:
    """Answers an episode's requests by the engine, and remembers the answers.

    After `repeat` the episode is played again from its reset: requests that equal the remembered
    ones get the same replies, without the engine. An environment that repeats itself therefore
    ends with the episode that the lost worker would have returned. Where it does not, the engine's
    conversation goes on from the tokens that are still the same.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._exchanges: list[_Exchange] = []
        self._place = 0

    def repeat(self) -> None:
        """Begin again with the first request."""
        self._place = 0

    async def settle(self) -> None:
        """Wait for the replies that were asked for: the engine is told of an episode's end last."""
        if pending := [exchange.reply for exchange in self._exchanges if not exchange.reply.done()]:
            await asyncio.wait(pending)

    def close(self) -> None:
        """Stop waiting for replies."""
        for exchange in self._exchanges:
            exchange.reply.cancel()

    async def reply(self, request: Any) -> Any:
        """Return the reply to the episode's next request.

        Raises:
            EngineError, ConfigError: as `Engine.generate`.
            SessionError: the environment did not repeat itself, and the engine cannot take back
                messages.
        """
        if self._place == len(self._exchanges):
            self._ask(request, request)
        elif self._exchanges[self._place].request != request:
            await self._ask_anew(request)
        exchange = self._exchanges[self._place]
        self._place += 1
        return await asyncio.shield(exchange.reply)

    def _ask(self, request: Any, sent: Any) -> None:
        reply = asyncio.create_task(self._engine.generate(sent))
        reply.add_done_callback(_observe)
        self._exchanges.append(_Exchange(request=request, reply=reply))

    async def _ask_anew(self, request: Any) -> None:
        """Ask in the place of a remembered request, which the engine has answered already."""
        if not isinstance(request, TokenRequest):
            raise SessionError(
                "its rollout worker was lost, and the environment did not repeat the episode"
            )
        # The engine has one request of an episode at a time.
        await asyncio.wait([exchange.reply for exchange in self._exchanges])
        known = _token_ids(self._exchanges)
        ids = [*_token_ids(self._exchanges[: self._place])[: request.num_kept], *request.new_ids]
        kept = _num_equal(ids[:-1], known)  # the model has to compute at least one token
        del self._exchanges[self._place :]
        num_kept = kept if kept < len(known) else None
        self._ask(request, replace(request, new_ids=ids[kept:], num_kept=num_kept))


def _token_ids(exchanges: Sequence[_Exchange]) -> list[int]:
    """Return the tokens of the conversation after these requests and replies."""
    ids: list[int] = []
    for exchange in exchanges:
        completion: Completion = exchange.reply.result()
        ids = [*ids[: exchange.request.num_kept], *exchange.request.new_ids, *completion.token_ids]
    return ids


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next(
        (n for n, (one, other) in enumerate(pairs) if one != other), min(map(len, (first, second)))
    )


def _observe(reply: asyncio.Task[Any]) -> None:
    """Take note of an error, which `reply` raises too unless the episode was cancelled."""
    if not reply.cancelled():
        reply.exception()
