"""One rollout worker on another node: its episodes, and replies of the engine to repeat."""

import asyncio
import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from openenv_pipe.config.schema import EngineCapabilities
from openenv_pipe.engines.base import Engine
from openenv_pipe.errors import PipeError, SessionError
from openenv_pipe.extras.cluster.channel import CONNECT_LIMIT_S, Channel, Listener
from openenv_pipe.extras.cluster.nodes import PlacedProcess, WorkerLostError
from openenv_pipe.extras.cluster.worker import (
    CancelOrder,
    EpisodeEnd,
    Event,
    Order,
    PlayOrder,
    ReplyOrder,
    ReplyRequest,
    WorkerFacts,
)
from openenv_pipe.rollout.context import EpisodeSpec
from openenv_pipe.types import Episode

REASON_LIMIT_S = 10.0  # for Ray to say why a worker's connection has ended


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
        """Wait for the replies still due: only then may the engine be told of the episode's end."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Play:
    replies: EpisodeReplies
    end: asyncio.Future[Episode]


class RemoteWorker:
    """Sends orders to a worker, and handles what it reports.

    Ray places, starts and ends it; orders and reports pass through a connection of their own.
    """

    facts: WorkerFacts  # after `start`

    def __init__(self, process: PlacedProcess, listener: Listener) -> None:
        self.process = process
        self.num_free = 0  # further episodes that it can play now
        self.num_deaths = 0  # of its environment servers
        self.is_lost = False
        self._plays: dict[int, _Play] = {}
        self._listener = listener
        self._channel: Channel | None = None  # after `start`
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start its environment servers, and connect to it.

        Raises WorkerLostError, HostError and ConfigError.
        """
        self.facts = await self.process.call("start")
        offer, accepted = self._listener.offer()
        await self.process.call("connect", offer)
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await accepted
        except TimeoutError:
            raise WorkerLostError(
                f"{self.process.name} has connected to {offer.address}:{offer.port}, but sent no "
                f"key within {CONNECT_LIMIT_S:g} s; RAY_USE_TLS has to be the same on all nodes"
            ) from None
        finally:  # `end` closes it, also if this task is cancelled
            if accepted.done() and not accepted.cancelled():
                self._channel = accepted.result()
        self.num_free = self.facts.capacity

    def end(self) -> None:
        """End the worker's process and the connection to it; nothing more is played on it."""
        self.is_lost = True
        self.process.kill()
        if self._channel is not None:
            self._channel.close()

    async def play(
        self,
        play: int,
        replies: EpisodeReplies,
        spec: EpisodeSpec,
        capabilities: EngineCapabilities,
    ) -> Episode:
        """Have an episode played, and return it when it has ended.

        play: an identifier that was not used before.

        Raises WorkerLostError if the worker is lost first, or the error that ends the run.
        """
        end = asyncio.get_running_loop().create_future()
        self._plays[play] = _Play(replies=replies, end=end)
        self._send(PlayOrder(play=play, spec=spec, capabilities=capabilities))
        try:
            return await end
        finally:
            if self._plays.pop(play, None) is not None and not self.is_lost:
                self._send(CancelOrder(play=play))

    async def serve(self) -> WorkerLostError:
        """Handle what the worker reports until it is lost; return the error that says why."""
        assert self._channel is not None
        serving = asyncio.create_task(self.process.call("serve"))
        handling = asyncio.create_task(self._handle_reports(self._channel))
        try:
            await asyncio.wait((serving, handling), return_when=asyncio.FIRST_COMPLETED)
            # Ray learns why a process ended some moments after its connection did.
            await asyncio.wait((serving,), timeout=REASON_LIMIT_S)
            lost = _why_lost(self.process.name, serving, handling)
        finally:
            self.is_lost = True
            serving.cancel()
            handling.cancel()
            for answering in self._answering:  # a late one would change what is repeated
                answering.cancel()
            self._channel.close()
        self.process.kill()  # it may be only unreachable
        self.end_all(lost)
        return lost

    async def _handle_reports(self, channel: Channel) -> None:
        with suppress(EOFError):
            while True:
                report: Event = await channel.receive()
                self.num_deaths = report.num_deaths
                match report.event:
                    case ReplyRequest():
                        answering = asyncio.create_task(self._answer(report.event))
                        self._answering.add(answering)
                        answering.add_done_callback(self._answering.discard)
                    case EpisodeEnd():
                        self._end(report.event)

    def end_all(self, error: PipeError) -> None:
        for play in self._plays.values():
            if not play.end.done():
                play.end.set_exception(error)

    async def _answer(self, event: ReplyRequest) -> None:
        play = self._plays.get(event.play)
        if play is None:
            return
        try:
            reply = await play.replies.reply(event.request)
        except SessionError as error:
            # Without its class, because not every subclass can be unpickled.
            self._send(ReplyOrder(play=event.play, reply=SessionError(str(error))))
        except Exception as error:
            if not play.end.done():
                play.end.set_exception(error)
        else:
            self._send(ReplyOrder(play=event.play, reply=reply))

    def _end(self, event: EpisodeEnd) -> None:
        play = self._plays.pop(event.play, None)
        if play is None or play.end.done():
            return
        if event.episode is None:
            assert event.error is not None
            play.end.set_exception(event.error)
        else:
            play.end.set_result(event.episode)

    def _send(self, order: Order) -> None:
        if not self.is_lost:
            assert self._channel is not None
            self._channel.send(order)


def _why_lost(name: str, *tasks: asyncio.Task[None]) -> WorkerLostError:
    """Return why a worker no longer serves, by Ray's account where it has one."""
    errors = [error for task in tasks if task.done() and (error := task.exception())]
    for error in errors:
        if isinstance(error, WorkerLostError):
            return error
    reason = f"{type(errors[0]).__name__}: {errors[0]}" if errors else "its connection has ended"
    return WorkerLostError(f"{name} is lost: {reason}")
