"""Connections of uvicorn within limits, whoever connects.

A connection may wait `WAIT_S` in all for the headers of a request, and as long for a client without
a key to take its answers. Those that wait are limited in number: the oldest is closed for a new
one, unless its client has shown a key. The application decides by the headers who may send a body,
which then has `BODY_S` to arrive. What is left of the body of an answered request is thrown away,
up to a limit.

Our own servers use them (`system/http_server.py`), and so do the servers that a run starts, in
Python environments of their own, from Python 3.9 on. So this module imports nothing of
openenv_pipe.
"""

from __future__ import annotations

import resource
import socket
from asyncio import BaseTransport, TimerHandle
from collections import OrderedDict
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_WAITING = 2048  # connections without a request under way
ROOM_S = 0.5  # for the request of a new connection beyond these, before the oldest is closed
WAIT_S = 10.0  # for the headers of a request
BODY_S = 60.0  # for all of a body
MAX_HEADER_BYTES = 2**14
MAX_LEFT_BYTES = 2**20  # of a body that nobody reads, before its connection is closed
MAX_FILES = 8192  # that this process may have open: more than those connections
STATE = "openenv_pipe.connection"  # the key of a connection in the state of its requests


class BoundedConnection(H11Protocol):
    """A connection with time limits for its client.

    h11 limits the size of headers; httptools, uvicorn's other parser, does not.
    """

    waiting: ClassVar[OrderedDict[BoundedConnection, None]]  # of its server, the oldest first

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = h11.Connection(h11.SERVER, MAX_HEADER_BYTES)
        self.is_known = False  # a request of it had a valid key
        # What it waits for: a "request", its "body", or the "admission" of a client that opens a
        # WebSocket or does not take its answers.
        self._wait = ""
        self._timer: TimerHandle | None = None
        self._left_bytes = 0  # that arrived after an answer
        self.app_state = {**self.app_state, STATE: self}

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        # asyncio sets TCP_NODELAY only on sockets that it has opened itself. Without it, the body
        # of an answer waits 40 ms for the client's acknowledgement of the headers.
        own: socket.socket = transport.get_extra_info("socket")
        if own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._update_wait()
        # Many connections are accepted at once, before the first bytes of any of them are read.
        if len(self.waiting) > MAX_WAITING:
            self.loop.call_later(ROOM_S, self._make_room)

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
        # Without these reference cycles, the memory is free before Python looks for cycles.
        self.cycle = None  # type: ignore[assignment]
        self.app_state = {}

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP; close the connection if it comes after an answer."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # where uvicorn would log a traceback
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_wait()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _update_wait(self) -> None:
        """Limit the time that the connection waits for its client."""
        if not self._is_idle:
            self._left_bytes = 0
        is_websocket = self.transport.get_protocol() is not self
        wait, limit_s = "", WAIT_S
        if self.transport.is_closing() or is_websocket or self.flow.write_paused:
            wait = "" if self.is_known else "admission"
        elif self._is_idle:
            wait = "request"
            limit_s = max(WAIT_S, self.timeout_keep_alive) if self.is_known else WAIT_S
        elif self.cycle.more_body:
            wait, limit_s = "body", BODY_S
        if wait != self._wait:
            self._stop_waiting()
            self._wait = wait
            if wait in ("request", "admission"):
                self.waiting[self] = None
            if wait:
                self._timer = self.loop.call_later(limit_s, self._end_wait)

    def _end_wait(self) -> None:
        wait = self._wait
        self._stop_waiting()
        if wait == "body" and (self.flow.read_paused or self.cycle.waiting_for_100_continue):
            self._update_wait()  # The application does not read what has arrived.
        elif wait == "body" and not self.cycle.response_started:
            text = b"the body did not arrive within %g s" % BODY_S
            lines = (b"HTTP/1.1 408 Request Timeout", b"Content-Length: %d" % len(text), b"", text)
            self.transport.write(b"\r\n".join(lines))
            self.transport.close()
        elif wait != "admission" or not self.is_known:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        self._wait = ""
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> None:
        oldest = next((each for each in self.waiting if not each.is_known), None)
        if oldest is not None and len(self.waiting) > MAX_WAITING:
            oldest._stop_waiting()
            oldest.transport.abort()


def connection_class() -> type[BoundedConnection]:
    """Return the class of one server's connections, which count together.

    The usual limit of 1,024 open files is raised: when a flood of connections reaches it, no
    connection is accepted for a second.
    """
    current, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    if current != resource.RLIM_INFINITY and current < MAX_FILES:
        most = MAX_FILES if allowed == resource.RLIM_INFINITY else min(MAX_FILES, allowed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, allowed))
    return type("Connection", (BoundedConnection,), {"waiting": OrderedDict()})
