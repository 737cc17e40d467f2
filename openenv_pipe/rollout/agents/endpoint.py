"""A web server for a model in four dialects, by OpenEnv's capture proxy.

The proxy translates between dialects, replays streams and counts calls; the calls themselves go to
an engine without HTTP. Programs that play episodes and `openenv-pipe serve` reach the model by it.
"""

import asyncio
import contextlib
import gc
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openenv_pipe.rollout.agents.calls import Connection, RefusedCallError, TooLongError
from openenv_pipe.rollout.agents.capture import (
    Upstream,
    UpstreamHTTPError,
    UpstreamPool,
    create_app,
    extract_api_key,
    model_endpoint,
)
from openenv_pipe.rollout.agents.dialects import Dialects
from openenv_pipe.rollout.agents.session_routes import error_response
from openenv_pipe.system.foreign_json import parse_foreign

MAX_BODY_BYTES = 64 * 2**20  # of one request
END_LIMIT_S = 5.0
QUEUE = 1024  # connections that wait to be accepted
FIRST_ERROR = 400  # of the status codes
RELAYED = "upstream returned 400: "  # what the proxy puts before our own reasons
PARSED = "openenv_pipe.parsed"  # the key of a request's JSON in its scope
_connection: ContextVar[Connection] = ContextVar("connection")


class Answers(Protocol):
    """Answers requests for chat completions."""

    async def complete(self, body: Mapping[str, Any], connection: Connection) -> dict[str, Any]:
        """Return the JSON of the answer. Raises RefusedCallError."""
        ...


class Endpoint:
    """The server, for models that `find` returns by the keys of clients."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        model: str,
        find: Callable[[str], Answers | None],
        level: str,
        routes: Sequence[BaseRoute] = (),
        middleware: Sequence[Middleware] = (),
        registry: Any = None,
        on_rejection: Callable[[str, str], None] = lambda key, reason: None,
    ) -> None:
        """
        listener: is closed when serving ends.
        model: the name that is listed.
        level: how much the proxy records of answers, `tokens` or `text`.
        routes: further addresses.
        registry: in the place of the proxy's own, which knows the keys that it is told.
        on_rejection: receives the key and the reason of each call of the model that gets an error.
        """
        logging.getLogger("intercept").setLevel(logging.ERROR)  # It tells of every odd request.
        capture = create_app(admin_key=secrets.token_hex(16), max_output_tokens=None)
        capture.state.upstreams = _Engines(find, level)
        capture.state.transforms = Dialects()
        if registry is not None:
            capture.state.registry = registry
        self._registry = capture.state.registry
        models = Route("/v1/models", _lister(model))
        calls = Route("/{path:path}", _caller(model_endpoint(capture)), methods=["POST"])
        app = Starlette(routes=[models, *routes, calls, Mount("/", capture)], middleware=middleware)
        config = uvicorn.Config(
            _Watched(app, on_rejection),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            ws_max_size=MAX_BODY_BYTES,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._listener = listener

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve until the end of the block.

        Each call allocates enough to start Python's garbage collector, whose full collections visit
        all objects of the process, torch's too, and take longer than many calls. The objects that
        are there at the beginning are therefore left out of them.
        """
        gc.collect()
        gc.freeze()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            yield
        finally:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(serving, END_LIMIT_S)
            self._listener.close()
            gc.unfreeze()


class _Engines(UpstreamPool):  # type: ignore[misc]  # openenv has no types
    """Gives the capture proxy the engine of each of its sessions."""

    def __init__(self, find: Callable[[str], Answers | None], level: str) -> None:
        super().__init__(default_client=_Engine(None), default_level=level)
        self._find = find
        self._level = level

    async def resolve(self, upstream: Upstream) -> tuple[Any, str]:
        return _Engine(self._find(str(upstream.api_key))), self._level


class _Engine:
    """In the place of the proxy's HTTP client: gives calls to what answers them."""

    provider = "openai"

    def __init__(self, answers: Answers | None) -> None:
        self._answers = answers

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._answers is None:
            raise UpstreamHTTPError(400, {"error": {"message": "the episode is over"}})
        try:
            return await self._answers.complete(body, _connection.get())
        except TooLongError as error:
            # The proxy answers this code with a final message, which agents understand.
            body = {"message": str(error), "code": "context_length_exceeded"}
            raise UpstreamHTTPError(400, {"error": body}) from error
        except RefusedCallError as error:
            raise UpstreamHTTPError(400, {"error": {"message": str(error)}}) from error


class _Server(uvicorn.Server):
    """Leaves the signals of this process alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Watched:
    """Reads a request whole, within a limit, and notices when its client leaves before the answer.

    The proxy alone would give the answer to nobody, and count it as one that the program used.
    """

    def __init__(self, app: ASGIApp, on_rejection: Callable[[str, str], None]) -> None:
        self._app = app
        self._on_rejection = on_rejection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._reporting(scope, send)
        body = await _read(receive)
        problem = "the request is too long" if body is None else ""
        if body is not None and scope["method"] == "POST":
            try:
                scope[PARSED] = parse_foreign(body or b"{}")
            except ValueError as error:
                problem = f"the request is not JSON: {error}"
        if problem:
            await error_response(400, problem)(scope, receive, send)
            return
        connection, left = Connection(), asyncio.Event()
        is_read = False
        token = _connection.set(connection)

        async def read_again() -> Message:
            nonlocal is_read
            if is_read:
                await left.wait()
                return {"type": "http.disconnect"}
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_watched(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            connection.is_answered = is_last
            await send(message)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            connection.is_lost = not connection.is_answered
            left.set()

        watching = asyncio.create_task(watch())
        try:
            await self._app(scope, read_again, send_watched)
        finally:
            _connection.reset(token)
            watching.cancel()

    def _reporting(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that reports an error in the place of a completion."""
        status = 0

        async def report(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= FIRST_ERROR and not scope["path"].startswith("/openenv/"):
                key = extract_api_key(Headers(scope=scope))
                reason = message.get("body", b"").decode(errors="replace")
                self._on_rejection(key or "", f"{status}: {_error_text(reason)}")
                status = 0
            await send(message)

        return report


def _error_text(body: str) -> str:
    """Return the message of an error in the form of OpenAI's interface, or the whole body."""
    try:
        return str(parse_foreign(body)["error"]["message"]).removeprefix(RELAYED)
    except (ValueError, LookupError, TypeError):
        return body


async def _read(receive: Receive) -> bytes | None:
    """Return the body of a request; None if it is too long, or its client has left."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return body


class _ParsedRequest(Request):
    """A request whose JSON has been parsed."""

    async def json(self) -> Any:
        return self.scope[PARSED]


def _caller(
    endpoint: Callable[[str, Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        parsed = _ParsedRequest(request.scope, request.receive)
        return await endpoint(request.path_params["path"], parsed)

    return call


def _lister(name: str) -> Callable[[Request], JSONResponse]:
    """List the one model. Some programs look for theirs before they call it."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "openenv-pipe"}
    return lambda _: JSONResponse({"object": "list", "data": [model]})
