"""Answers as JSON and as streams: text of others is made visible; NaN and infinity become null."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http_server import BodyError, read_body
from openenv_pipe.system.untrusted_json import parse_request
from openenv_pipe.system.untrusted_text import visible

HEARTBEAT_S = 15.0  # after which a connection without events gets a comment
MAX_SENT_BYTES = 64 * 1024


def stream_changes(
    request: Request, read: Callable[[], Awaitable[Any]], *, poll_s: float
) -> StreamingResponse:
    """Answer with an event for each change of what `read` returns, which is JSON.

    The stream ends when the page is closed or the server ends (`app.state.has_ended`).
    """
    has_ended: asyncio.Event = request.app.state.has_ended

    async def changes() -> AsyncIterator[str]:
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

    return StreamingResponse(changes(), media_type="text/event-stream")


class Answer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content).encode()


def as_json(value: Any) -> str:
    """Return JSON in ASCII, in which no text can control or reorder what a page shows."""
    return json.dumps(_clean(value), allow_nan=False, separators=(",", ":"))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else visible(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {visible(str(key)): _clean(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(each) for each in value]
    return value


def acting(
    act: Callable[[Request, Mapping[str, Any]], Awaitable[Any]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with what `act` returns for the object that a page sends."""

    async def endpoint(request: Request) -> Response:
        return Answer(await act(request, await _sent(request)))

    return endpoint


def key_of(request: Request) -> str:
    """Return the run, or the sweep, that an address names."""
    return "/".join(request.path_params.values())


def error_answer(request: Request, error: Exception) -> Response:
    is_sent = request.method not in ("GET", "HEAD")
    return Answer({"error": str(error)}, status_code=400 if is_sent else 404)


async def _sent(request: Request) -> Mapping[str, Any]:
    """Read what a page has sent. Raises ConfigError if it is not an object, or too long."""
    try:
        content = await read_body(request.scope, request.receive, max_bytes=MAX_SENT_BYTES)
        value = parse_request(content or b"{}")
    except BodyError as error:
        raise ConfigError(f"{error}; send less, or try again") from error
    except ValueError as error:
        raise ConfigError(f"what was sent is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"what was sent is {value!r:.80}; expected an object")
    return value
