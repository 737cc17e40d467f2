"""The web server that programs reach: the model in four dialects, and their environment's session.

OpenEnv's capture proxy translates between dialects, replays streams and counts calls; the calls
themselves go to the engine without HTTP. Every episode has a random key, which is the password and
the route. `/v1/...` and the paths of other dialects take it where their clients send it; the
addresses of a session have it in their path (`session_routes`).
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from openenv.core.harness.capture.server import UpstreamPool, create_app
from openenv.core.harness.capture.sessions import Session as CaptureSession
from openenv.core.harness.capture.sessions import Upstream
from openenv.core.harness.capture.upstream import UpstreamHTTPError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openenv_pipe.rollout.agents.calls import (
    MODEL,
    Connection,
    ModelCalls,
    RefusedCallError,
    TooLongError,
)
from openenv_pipe.rollout.agents.session_routes import SessionRoutes, error_response
from openenv_pipe.rollout.agents.steps import EnvironmentSteps
from openenv_pipe.system.foreign_json import parse_foreign
from openenv_pipe.system.foreign_text import visible

ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 64 * 2**20  # of one request
END_LIMIT_S = 5.0
QUEUE = 1024  # connections that wait to be accepted
_connection: ContextVar[Connection] = ContextVar("connection")


@dataclass(kw_only=True, slots=True)
class Rollout:
    """What the gateway knows of one episode: its key, its model calls and its session."""

    key: str
    calls: ModelCalls
    steps: EnvironmentSteps
    capture: CaptureSession = field(repr=False)

    @property
    def num_refused_calls(self) -> int:
        """How many calls got the final message because the budget was used up."""
        return int(self.capture.budget_stop_count)

    @property
    def fatal_findings(self) -> list[str]:
        """What makes the recorded calls useless for training."""
        return [visible(text) for text in self.capture.findings if text.startswith("[FATAL")]


class Gateway:
    """The server, and the rollouts that it knows."""

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}
        logging.getLogger("intercept").setLevel(logging.ERROR)  # It tells of every odd request.
        capture = create_app(admin_key=secrets.token_hex(16), max_output_tokens=None)
        capture.state.upstreams = _Engines(self._rollouts)
        self._registry = capture.state.registry
        app = Starlette(
            routes=[
                Route("/v1/models", _models),
                *SessionRoutes(self._steps).routes,
                Mount("/", capture),
            ]
        )
        config = uvicorn.Config(
            _Watched(app),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            ws_max_size=MAX_BODY_BYTES,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._listener = socket.create_server((ADDRESS, 0), backlog=QUEUE)
        self.url = f"http://{ADDRESS}:{self._listener.getsockname()[1]}"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve until the end of the block."""
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            yield
        finally:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(serving, END_LIMIT_S)
            self._listener.close()

    @contextlib.contextmanager
    def rollout(
        self, calls: ModelCalls, steps: EnvironmentSteps, *, max_calls: int
    ) -> Iterator[Rollout]:
        """Answer the program of one episode until the end of the block."""
        key = f"sk-{secrets.token_hex(16)}"
        capture = self._registry.create(
            key, upstream=Upstream(llm_url="", api_key=key), max_model_calls=max_calls
        )
        rollout = Rollout(key=key, calls=calls, steps=steps, capture=capture)
        self._rollouts[key] = rollout
        try:
            yield rollout
        finally:
            del self._rollouts[key]
            self._registry.delete(key)

    def _steps(self, key: str) -> EnvironmentSteps | None:
        rollout = self._rollouts.get(key)
        return None if rollout is None else rollout.steps


class _Engines(UpstreamPool):  # type: ignore[misc]  # openenv has no types
    """Gives the capture proxy the engine of each of its sessions."""

    def __init__(self, rollouts: dict[str, Rollout]) -> None:
        super().__init__(default_client=_Engine(None), default_level="tokens")
        self._rollouts = rollouts

    async def resolve(self, upstream: Upstream) -> tuple[Any, str]:
        return _Engine(self._rollouts.get(str(upstream.api_key))), "tokens"


class _Engine:
    """In the place of the proxy's HTTP client: answers one rollout's calls by the engine."""

    provider = "openai"

    def __init__(self, rollout: Rollout | None) -> None:
        self._rollout = rollout

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._rollout is None:
            raise UpstreamHTTPError(400, {"error": {"message": "the episode is over"}})
        try:
            return await self._rollout.calls.complete(body, _connection.get())
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

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        problem = "the request is too long" if body is None else _problem_of(scope, body)
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


def _problem_of(scope: Scope, body: bytes) -> str:
    if scope["method"] != "POST":
        return ""
    try:
        parse_foreign(body or b"{}")
    except ValueError as error:
        return f"the request is not JSON: {error}"
    return ""


def _models(_: Request) -> JSONResponse:
    """List the one model. Some programs look for theirs before they call it."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "openenv-pipe"}
    return JSONResponse({"object": "list", "data": [model]})
