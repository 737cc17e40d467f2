"""Our own HTTP servers, within the limits of `server_side/openenv_pipe_limits.py`.

The application decides by the headers who may send a body, and reads it with `read_body`.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from openenv_pipe.system.server_side.openenv_pipe_limits import STATE, connection_class

Message = MutableMapping[str, Any]
QUEUE = 1024  # connections that wait to be accepted


class BodyError(Exception):
    """A body that is not read; with the status that its request gets."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class BoundedServer(uvicorn.Server):
    """Serves an ASGI application, whose connections are limited."""

    def __init__(self, app: Callable[..., Awaitable[None]], **options: Any) -> None:
        """options: further options of uvicorn."""
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(),
                backlog=QUEUE,
                access_log=False,
                server_header=False,
                **options,
            )
        )


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
) -> bytes:
    """Return the body of a request.

    Raises BodyError: it is longer than `max_bytes` or compressed, or its client leaves.
    """
    headers = dict(scope["headers"])
    if (encoding := headers.get(b"content-encoding", b"identity")) != b"identity":
        raise BodyError(415, f"the body is {encoding!r:.40}-encoded; send it as it is")
    length = headers.get(b"content-length", b"0")
    body = bytearray()
    while len(body) <= max_bytes and not int(length) > max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BodyError(400, "the client has left")
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)
    raise BodyError(413, f"the body is longer than {max_bytes} bytes")
