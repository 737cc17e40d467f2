"""A lease of servers that another process shares among several clients, one client at a time.

The client connects to the owner's unix socket and writes what it needs as one line of JSON. The
lease lasts as long as the connection, so that the servers of a client that dies are free again.
Each line that the owner writes is JSON too: an `error`, or the `urls` of the servers that are up,
with `facts` about them.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from openenv_pipe.errors import FailureError

MAX_LINE_BYTES = 2**24


class ServerLease:
    """Servers that this process has to itself until it releases them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.urls: list[str] = []
        self.facts: dict[str, Any] = {}
        self._reader = reader
        self._writer = writer

    @classmethod
    async def acquire(cls, socket: Path, request: Mapping[str, Any]) -> "ServerLease":
        """Wait until the owner listening at `socket` has servers that fit `request`.

        The wait has no limit of its own: the owner's are bounded, and its end closes the
        connection.

        Raises:
            FailureError: with the owner's reason, or because there is no owner.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(socket, limit=MAX_LINE_BYTES)
        except OSError as error:
            raise FailureError(f"the process that shares the servers is gone: {error}") from error
        lease = cls(reader, writer)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            await lease.wait_for_change()
        except BaseException:
            await lease.release()
            raise
        return lease

    async def wait_for_change(self) -> None:
        """Wait until the URLs change, and update `urls` and `facts`.

        Raises:
            FailureError: the servers have failed for good, or their owner has ended.
        """
        try:
            line = await self._reader.readline()
        except OSError:
            line = b""
        if not line:
            raise FailureError("the process that shares the servers has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise FailureError(answer["error"])
        self.urls, self.facts = answer["urls"], answer["facts"]

    async def release(self) -> None:
        """Let the next client have the servers. May be called again."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
