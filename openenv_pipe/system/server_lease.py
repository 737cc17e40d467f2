"""Servers that another process keeps for several runs: how a run asks for them and hears of them.

A run connects to the keeper's unix socket, says what it needs in one line of JSON, and has the
servers for itself until that connection ends, so a run that dies gives them back. Each line of the
keeper's is JSON too: an `error`, or the `urls` of the servers that are up, with `facts` about them.
Refused here: any other way to end a loan, and any say in how the servers live.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from openenv_pipe.errors import FailureError

LONGEST_LINE = 2**24  # bytes


class Loan:
    """Servers that are ours for a while."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.urls: list[str] = []
        self.facts: dict[str, Any] = {}
        self._reader = reader
        self._writer = writer

    @classmethod
    async def ask(cls, keeper: Path, request: Mapping[str, Any]) -> "Loan":
        """Wait for servers that fit. Raises FailureError with the keeper's reason.

        The keeper answers or ends: its own waits are bounded, and its end ends the connection.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(keeper, limit=LONGEST_LINE)
        except OSError as error:
            raise FailureError(f"the process that keeps the servers is gone: {error}") from error
        loan = cls(reader, writer)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            await loan.news()
        except BaseException:
            await loan.give_back()
            raise
        return loan

    async def news(self) -> None:
        """Return when other URLs hold. Raises FailureError when there will be none any more."""
        try:
            line = await self._reader.readline()
        except OSError:
            line = b""
        if not line:
            raise FailureError("the process that keeps the servers has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise FailureError(answer["error"])
        self.urls, self.facts = answer["urls"], answer["facts"]

    async def give_back(self) -> None:
        """The next run may have them. May be called again."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
