"""Decide by a request's headers who may send it, and read it only then, within limits.

A key is a client's password, and what its requests are counted by. A page of another site can send
requests to servers of this machine, also under names that it makes resolve to this machine: such
requests are rejected by `Origin` and `Host`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openenv_pipe.extras.agents.calls import Connection
from openenv_pipe.system.http import LOOPBACK
from openenv_pipe.system.http_server import BodyError, mark_known, read_body
from openenv_pipe.system.untrusted_json import parse_request, parse_untrusted

# Codes of JSON-RPC.
PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMETERS = -32700, -32600, -32601, -32602
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_GOOGLE_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
}
FIRST_FAULT = 500  # of the status codes that are the server's fault
MAX_CALL_BYTES = 16 * 2**20  # of a call of the model
MAX_MESSAGE_BYTES = 4 * 2**20  # of every other request, and of a message of a WebSocket
MAX_OPEN_BY_CLIENT = 1024  # requests and WebSockets
MAX_OPEN = 4096
PARSED_AT_ONCE = 2**16  # bytes of JSON that are parsed in less than a millisecond
FIRST_ERROR = 400  # of the status codes
POLICY_VIOLATION, TRY_AGAIN_LATER = 1008, 1013  # of WebSockets
RELAYED = "upstream returned 400: "  # what the proxy puts before our own reasons
PARSED = "openenv_pipe.parsed"  # the key of a request's JSON in its scope
connection: ContextVar[Connection] = ContextVar("connection")


def error_response(status: int, message: str, path: str = "") -> JSONResponse:
    """Return an error in the form of the dialect that a path belongs to, by default OpenAI's."""
    is_fault = status >= FIRST_FAULT
    kind = "api_error" if is_fault else "invalid_request_error"
    body: dict[str, Any]
    lowered = path.lower()
    if lowered.endswith(("/messages", "/messages/count_tokens")):
        kind = _ANTHROPIC_TYPES.get(status, kind)
        body = {"type": "error", "error": {"type": kind, "message": message}}
    elif lowered.endswith(("generatecontent", ":counttokens")):
        name = _GOOGLE_STATUSES.get(status, "INTERNAL" if is_fault else "INVALID_ARGUMENT")
        body = {"error": {"code": status, "message": message, "status": name}}
    elif lowered.endswith("/mcp"):
        body = rpc_error(None, PARSE_ERROR if status == 400 else INVALID_REQUEST, message)
    else:
        body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status_code=status)


def rpc_error(number: Any, code: int, message: str) -> dict[str, Any]:
    """Return an error of JSON-RPC. number: of the message that it answers."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    client: str  # whom it is counted for: the key
    max_bytes: int


class RejectedError(Exception):
    """A request that is not read. The text goes to its client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Gate:
    """ASGI middleware that passes on whole, parsed requests of clients that are admitted.

    It notices when a client leaves before the answer. The proxy alone would give the answer to
    nobody, and count it as one that the program used.
    """

    def __init__(
        self,
        app: ASGIApp,
        admit: Callable[[Scope, Headers], Admitted],
        on_rejection: Callable[[str, str], None],
    ) -> None:
        """
        admit: decides on a request by its head alone. Raises RejectedError.
        on_rejection: receives the key and the reason of each call of the model that gets an error,
            if the key is valid.
        """
        self._app = app
        self._admit = admit
        self._on_rejection = on_rejection
        self._open = Counter[str]()  # by client
        self._arriving = Counter[str]()  # requests that are being read, by client

    def is_receiving(self, client: str) -> bool:
        """Whether a request of a client has begun to arrive and is not yet read and parsed."""
        return self._arriving[client] > 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        try:
            admitted = self._admit(scope, Headers(scope=scope))
            mark_known(scope)
            if self._open[admitted.client] >= MAX_OPEN_BY_CLIENT:
                text = f"{MAX_OPEN_BY_CLIENT} requests with this key are open; wait for answers"
                raise RejectedError(429, text)
            if self._open.total() >= MAX_OPEN:
                raise RejectedError(503, "too many requests are open; try again later")
        except RejectedError as error:
            if is_http:
                answer = error_response(error.status, str(error), scope["path"])
                await answer(scope, receive, send)
            else:
                code = TRY_AGAIN_LATER if error.status in (429, 503) else POLICY_VIOLATION
                await send({"type": "websocket.close", "code": code})
            return
        self._open[admitted.client] += 1
        try:
            if is_http:
                await self._answer(admitted, scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            self._open -= Counter([admitted.client])

    async def _answer(self, admitted: Admitted, scope: Scope, receive: Receive, send: Send) -> None:
        send = self._reporting(admitted.client, scope, send)
        self._arriving[admitted.client] += 1
        try:
            scope[PARSED] = await _read(scope, receive, admitted.max_bytes)
        except BodyError as error:
            answer = error_response(error.status, str(error), scope["path"])
            await answer(scope, receive, send)
            return
        finally:
            self._arriving -= Counter([admitted.client])
        watched, left = Connection(), asyncio.Event()

        async def wait_for_end() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send_watched(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            watched.is_answered = is_last
            await send(message)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            watched.is_lost = not watched.is_answered
            left.set()

        token = connection.set(watched)
        watching = asyncio.create_task(watch())
        try:
            await self._app(scope, wait_for_end, send_watched)
        finally:
            connection.reset(token)
            watching.cancel()

    def _reporting(self, client: str, scope: Scope, send: Send) -> Send:
        """Return a `send` that also reports an error that is sent instead of a completion."""
        status = 0

        async def report(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= FIRST_ERROR and not scope["path"].startswith("/openenv/"):
                reason = error_text(message.get("body", b"").decode(errors="replace"))
                self._on_rejection(client, f"{status}: {reason}")
                status = 0
            await send(message)

        return report


class ParsedRequest(Request):
    async def json(self) -> Any:
        return self.scope[PARSED]


async def _read(scope: Scope, receive: Receive, max_bytes: int) -> Any:
    """Return the JSON of a request's body; an empty object if there is none. Raises BodyError.

    A long body is parsed in a thread, so that other clients are answered meanwhile.
    """
    if scope["method"] != "POST":
        return {}
    body = await read_body(scope, receive, max_bytes=max_bytes)
    try:
        if len(body) <= PARSED_AT_ONCE:
            return parse_request(body or b"{}")
        return await asyncio.to_thread(parse_request, body)
    except ValueError as error:
        raise BodyError(400, f"the request is not JSON: {error}") from None


def error_text(body: str) -> str:
    try:
        return str(parse_untrusted(body)["error"]["message"]).removeprefix(RELAYED)
    except (ValueError, LookupError, TypeError):
        return body


def reject_other_sites(headers: Headers, host: str | None) -> None:
    """Reject what a page of another site may have sent.

    host: the address at which the server listens; None: a socket that no page can reach.

    Raises RejectedError.
    """
    given = headers.get("host", "")
    name = given[1 : given.find("]")] if given.startswith("[") else given.partition(":")[0]
    if host in LOOPBACK and name.lower() not in LOOPBACK:
        text = f"the Host {given!r:.80} is not a name of this machine; use {host}"
        raise RejectedError(403, text)
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != given:
        raise RejectedError(403, f"pages of {origin!r:.80} may send nothing to this server")
