"""A middleware of vLLM's API server that asks every request for the server's key.

vLLM itself asks for the key in VLLM_API_KEY only at the paths of its public API, and leaves those
of its development mode open, by which weights are replaced. vLLM imports this module by
`--middleware openenv_pipe_key.RequireKey` in its own Python environment, so it imports nothing of
openenv_pipe.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireKey:
    """An ASGI application that passes on the requests with the key, and refuses all others."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"the key is missing or wrong"})

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        return any(
            name == b"authorization" and hmac.compare_digest(value, self._expected)
            for name, value in headers
        )
