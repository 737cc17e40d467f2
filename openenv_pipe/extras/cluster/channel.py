"""Messages between the run's process and a rollout worker, over one TCP connection.

A call of a Ray actor takes about a millisecond of processor time, more than half of what the rest
of an episode's step costs; a message of this file takes about a tenth of such a call.
"""

import asyncio
import os
import pickle
import secrets
import ssl
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from openenv_pipe.errors import HostError

CONNECT_LIMIT_S = 30.0
KEY_BYTES = 32
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionOffer:
    """Where one worker connects to the run's process, and the key by which it is known there."""

    address: str
    port: int
    key: bytes


class Channel:
    """One end of a connection. Messages sent in one turn of the event loop share a write."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: list[bytes] = []  # messages of this turn of the event loop

    def send(self, message: Any) -> None:
        """Send a message soon. A lost connection shows in `receive`."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._write)
        self._waiting += (_LENGTH.pack(len(data)), data)

    async def receive(self) -> Any:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EOFError("the connection has ended") from error

    def close(self) -> None:
        self._writer.close()

    def _write(self) -> None:
        data, self._waiting = b"".join(self._waiting), []
        if not self._writer.is_closing():
            self._writer.write(data)


class Listener:
    """Accepts the connections of workers that were sent an offer; others are closed unread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._server: asyncio.Server | None = None
        self._offered: dict[bytes, asyncio.Future[Channel]] = {}
        self._greeting: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(
                self._accept, self._address, 0, ssl=tls_context(ssl.Purpose.CLIENT_AUTH)
            )
        except OSError as error:
            raise HostError(
                f"cannot listen at {self._address}, the address of this machine in the Ray "
                f"cluster: {error}"
            ) from error

    def offer(self) -> tuple[ConnectionOffer, asyncio.Future[Channel]]:
        """Return an offer for one connection, and its channel once a worker has accepted it."""
        assert self._server is not None
        key = secrets.token_bytes(KEY_BYTES)
        accepted = self._offered[key] = asyncio.get_running_loop().create_future()
        accepted.add_done_callback(lambda _: self._offered.pop(key, None))  # also if given up
        port = self._server.sockets[0].getsockname()[1]
        return ConnectionOffer(address=self._address, port=port, key=key), accepted

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for greeting in self._greeting:
            greeting.cancel()
        await asyncio.gather(*self._greeting, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = asyncio.create_task(self._greet(reader, writer))
        self._greeting.add(greeting)
        greeting.add_done_callback(self._greeting.discard)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the key that a connection begins with. Nothing is unpickled before it is known."""
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(CONNECT_LIMIT_S):
                key = await reader.readexactly(KEY_BYTES)
            accepted = self._offered.pop(key, None)
            if accepted is not None and not accepted.done():
                accepted.set_result(Channel(reader, writer))
                return
        writer.close()


async def connect(offer: ConnectionOffer) -> Channel:
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            reader, writer = await asyncio.open_connection(
                offer.address, offer.port, ssl=tls_context(ssl.Purpose.SERVER_AUTH)
            )
    except (OSError, TimeoutError) as error:
        raise HostError(
            f"cannot reach the run's process at {offer.address}:{offer.port} "
            f"({error or 'no answer'}); the nodes of the cluster have to reach any TCP port of the "
            "machine of the run"
        ) from error
    writer.write(offer.key)
    return Channel(reader, writer)


def tls_context(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Return the TLS that Ray's own variables ask for, with its certificates at both ends."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    files = {name: os.environ.get(f"RAY_TLS_{name}") for name in ("CA_CERT", "SERVER_CERT")}
    try:
        context = ssl.create_default_context(purpose, cafile=files["CA_CERT"])
        context.load_cert_chain(str(files["SERVER_CERT"]), os.environ.get("RAY_TLS_SERVER_KEY"))
    except (OSError, ssl.SSLError) as error:
        raise HostError(f"RAY_USE_TLS=1: cannot load the certificates of RAY_TLS_*: {error}") from (
            error
        )
    context.check_hostname = False  # as in Ray, the certificate authority alone decides
    context.verify_mode = ssl.CERT_REQUIRED
    return context
