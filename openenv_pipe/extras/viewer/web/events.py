"""Streams of events (SSE), by which pages learn that something has changed."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

HEARTBEAT_S = 15.0  # after which a connection without events gets a comment


def stream_changes(
    request: Request, read: Callable[[], Awaitable[Any]], *, poll_s: float
) -> StreamingResponse:
    """Answer with an event for each change of what `read` returns, which is JSON.

    The stream ends when the page is closed or the server ends (`app.state.has_ended`).
    """
    has_ended: asyncio.Event = request.app.state.has_ended
    return StreamingResponse(_changes(has_ended, read, poll_s), media_type="text/event-stream")


async def _changes(
    has_ended: asyncio.Event, read: Callable[[], Awaitable[Any]], poll_s: float
) -> AsyncIterator[str]:
    last, quiet_s = None, 0.0
    while not has_ended.is_set():
        now = await read()
        if now != last:
            yield f"data: {json.dumps(now)}\n\n"
            last, quiet_s = now, 0.0
        elif quiet_s >= HEARTBEAT_S:
            yield ": nothing new\n\n"
            quiet_s = 0.0
        try:
            await asyncio.wait_for(has_ended.wait(), poll_s)
        except TimeoutError:
            quiet_s += poll_s
