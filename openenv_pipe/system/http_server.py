"""Limits that every HTTP server of this program has, whoever connects to it.

A connection may wait `WAIT_S` in all for the headers of a request; those that wait are limited in
number, and the oldest is closed for a new one, unless its client has shown a key. What is left of
the body of an answered request is thrown away, up to a limit. The application decides by the
headers who may send a body, and reads it by `read_body`.
"""

import asyncio
import socket
from asyncio import BaseTransport, TimerHandle
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

Message = MutableMapping[str, Any]
QUEUE = 1024  # connections that wait to be accepted
ACCEPTED_AT_ONCE = 64
MAX_WAITING = 256  # connections of unknown clients without a request under way
WAIT_S = 10.0  # for the headers of a request
MAX_LEFT_BYTES = 2**20  # of a body that nobody reads, before its connection is closed
STATE = "connection"  # the key of a connection in the state of its requests


class BodyError(Exception):
    """A body that is not read; with the status that its request gets."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Connection(H11Protocol):
    """A connection that does not wait for its client without a limit.

    h11 limits the size of headers; httptools, uvicorn's other parser, does not.
    """

    _waiting: OrderedDict["_Connection", None]  # the oldest first; set by `BoundedServer`

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_known = False  # a request of it had a valid key
        self._timer: TimerHandle | None = None
        self._left_bytes = 0  # that arrived after an answer
        self.app_state = {**self.app_state, STATE: self}

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        # asyncio does so for sockets that it has opened itself. Without it, the body of an answer
        # waits 40 ms for the client's acknowledgement of the headers.
        own: socket.socket = transport.get_extra_info("socket")
        if own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._update_wait()
        if len(self._waiting) > MAX_WAITING:
            oldest = next((each for each in self._waiting if not each.is_known), self)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            self._left_bytes += len(data)
        super().data_received(data)
        if self._left_bytes > MAX_LEFT_BYTES:
            self.transport.abort()
        self._update_wait()

    def on_response_complete(self) -> None:
        self.cycle.body.clear()  # Nobody reads it any more.
        super().on_response_complete()
        self._update_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        # Without these circles, the memory is free before Python looks for unreachable objects.
        self.cycle = None  # type: ignore[assignment]
        self.app_state = {}

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _update_wait(self) -> None:
        """Limit the time until the next request is under way."""
        is_gone = self.transport.is_closing() or self.transport.get_protocol() is not self
        if is_gone or not self._is_idle:
            self._left_bytes = 0
            self._stop_waiting()
        elif self._timer is None:
            self._waiting[self] = None
            self._timer = self.loop.call_later(WAIT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BoundedServer(uvicorn.Server):
    """Serves an ASGI application within the limits of this module."""

    def __init__(self, app: Callable[..., Awaitable[None]], **options: Any) -> None:
        """options: further ones of uvicorn."""
        waiting: OrderedDict[_Connection, None] = OrderedDict()
        connection = type("Connection", (_Connection,), {"_waiting": waiting})
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                backlog=ACCEPTED_AT_ONCE,
                access_log=False,
                server_header=False,
                **options,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. asyncio accepts as many connections at once as may wait to be accepted.

        Connections that are accepted at once are read after all of them are there. With fewer than
        are kept, none is closed before its client's first bytes are read.
        """
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(QUEUE)


def mark_known(scope: Message) -> None:
    """Note that the client of a request has a valid key."""
    connection = scope.get("state", {}).get(STATE)
    if connection is not None:
        connection.is_known = True


async def read_body(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    *,
    max_bytes: int,
    limit_s: float,
) -> bytes:
    """Return the body of a request.

    Raises BodyError: it is longer, its client needs more time or leaves, or it is compressed.
    """
    headers = dict(scope["headers"])
    if (encoding := headers.get(b"content-encoding", b"identity")) != b"identity":
        raise BodyError(415, f"the body is {encoding!r:.40}-encoded; send it as it is")
    length = headers.get(b"content-length", b"0")
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            while len(body) <= max_bytes and not int(length) > max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise BodyError(400, "the client has left")
                body += message.get("body", b"")
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise BodyError(408, f"the body did not arrive within {limit_s:g} s") from None
    raise BodyError(413, f"the body is longer than {max_bytes} bytes")
