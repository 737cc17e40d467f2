"""A web server for a model in four dialects, built on OpenEnv's capture proxy.

The proxy translates between dialects, replays streams and counts calls; the calls themselves go to
an engine without HTTP. Programs that play episodes and clients of `serve --engine local` use it.
"""

import asyncio
import contextlib
import gc
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from openenv_pipe.extras.agents.calls import Connection, RejectedCallError, TooLongError
from openenv_pipe.extras.agents.http.capture import (
    Upstream,
    UpstreamHTTPError,
    UpstreamPool,
    create_app,
    model_endpoint,
)
from openenv_pipe.extras.agents.http.dialects import Dialects
from openenv_pipe.extras.agents.http.gate import (
    FIRST_ERROR,
    MAX_CALL_BYTES,
    MAX_MESSAGE_BYTES,
    Admitted,
    Gate,
    ParsedRequest,
    RejectedError,
    connection,
    error_response,
    error_text,
)
from openenv_pipe.system.http_server import QUEUE, BoundedServer

CONVERSATIONS = ("messages", "input", "contents")
SYSTEM = ("system", "systemInstruction", "system_instruction", "instructions")
# Fields of messages, their parts and tools, by type. Null is as if there were none.
TEXTS = frozenset(("type", "role", "text", "thinking"))
NESTED = frozenset(("content", "parts", "tools", "summary", "output", "functionDeclarations"))
LISTS = frozenset(("parts", "functionDeclarations"))
END_LIMIT_S = 5.0
MODELS = "/v1/models"
# How the paths of model calls end, and the path by which the proxy knows each.
CALLS = {
    "/chat/completions": "v1/chat/completions",
    "/responses": "v1/responses",
    "/messages": "v1/messages",
    "/messages/count_tokens": "v1/messages/count_tokens",
}
GOOGLE_CALLS = (":generatecontent", ":streamgeneratecontent", ":counttokens")


def check_shape(body: Any) -> str | None:
    """Return what is wrong with the types of a request, in any dialect; None if nothing is.

    OpenEnv's proxy fails on types that the clients of its dialects do not write. The walk visits a
    conversation and its tools, but no schemas, arguments and results, which may be any JSON.
    """
    if not isinstance(body, dict):
        return f"the request is {body!r:.40}; expected a JSON object"
    if not isinstance(body.get("stream"), bool | None):
        return f"stream is {body['stream']!r:.40}; expected true or false"
    for name in CONVERSATIONS:
        items = body.get(name, [])
        if not isinstance(items, list) and not (name == "input" and isinstance(items, str)):
            return f"{name} is {items!r:.40}; expected a list"
        for index, item in enumerate(items):
            if not isinstance(item, dict | str) or (name == "messages" and isinstance(item, str)):
                return f"{name}.{index} is {item!r:.40}; expected an object"
    tools = body.get("tools")
    if not isinstance(tools, list | None):
        return f"tools is {tools!r:.40}; expected a list"
    visited = {name: body[name] for name in (*CONVERSATIONS, *SYSTEM, "tools") if name in body}
    return next((problem for name in visited for problem in _problems(visited[name], name)), None)


def _problems(value: Any, path: str) -> Iterator[str]:
    """Yield what has a wrong type in a message, a part of one, a tool, or a list of these."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(item, f"{path}.{index}")
    elif isinstance(value, dict):
        if value.get("type") == "text" and not isinstance(value.get("text"), str):
            yield f"{path}.text is {value.get('text')!r:.40}; expected a string"
        for name, inner in value.items():
            if name in TEXTS and not isinstance(inner, str | None):
                yield f"{path}.{name} is {inner!r:.40}; expected a string"
            elif name in LISTS and not isinstance(inner, list):
                yield f"{path}.{name} is {inner!r:.40}; expected a list"
            elif name in NESTED:
                yield from _problems(inner, f"{path}.{name}")


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of IPv4 or IPv6. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=QUEUE)


class Answers(Protocol):
    async def complete(self, body: Mapping[str, Any], connection: Connection) -> dict[str, Any]: ...


class Endpoint:
    """Serves the models that `find` returns for the keys of clients."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        model: str,
        find: Callable[[str], Answers | None],
        admit: Callable[[Scope, Headers], Admitted],
        level: str,
        routes: Sequence[BaseRoute] = (),
        registry: Any = None,
        answers_any_name: bool = True,
        on_rejection: Callable[[str, str], None] = lambda key, reason: None,
    ) -> None:
        """
        listener: is closed when serving ends.
        model: the name that is listed.
        admit, on_rejection: those of `Gate`.
        level: how much the proxy records of answers, `tokens` or `text`.
        routes: further addresses.
        registry: replaces the proxy's own, which knows only the keys that it is told.
        answers_any_name: False: a call that names another model is answered 404, as by vLLM and
            OpenAI, so that a client with the wrong address or name finds out.
        """
        logging.getLogger("intercept").setLevel(logging.ERROR)  # It logs every odd request.
        capture = create_app(admin_key=secrets.token_hex(16), max_output_tokens=None)
        capture.state.upstreams = _Engines(find, level)
        capture.state.transforms = Dialects()
        if registry is not None:
            capture.state.registry = registry
        self._registry = capture.state.registry
        models = Route(MODELS, _lister(model))
        only = None if answers_any_name else model
        calls = Route("/{path:path}", _caller(model_endpoint(capture), only), methods=["POST"])
        app = Starlette(routes=[models, *routes, calls])
        self.gate = Gate(app, admit, on_rejection)
        self._server = _Server(
            self.gate,
            log_config=None,
            log_level="error",
            lifespan="off",
            ws_max_size=MAX_MESSAGE_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._listener = listener

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve until the end of the block.

        Each call allocates enough to start Python's garbage collector, whose full collections visit
        all objects of the process, torch's too, and take longer than many calls. They therefore
        leave out the objects that exist at the beginning.
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
    """Replaces the proxy's HTTP client: passes calls on to what answers them."""

    provider = "openai"

    def __init__(self, answers: Answers | None) -> None:
        self._answers = answers

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._answers is None:
            raise UpstreamHTTPError(400, {"error": {"message": "the episode is over"}})
        try:
            return await self._answers.complete(body, connection.get())
        except TooLongError as error:
            # The proxy answers this code with a final message, which agents understand.
            body = {"message": str(error), "code": "context_length_exceeded"}
            raise UpstreamHTTPError(400, {"error": body}) from error
        except RejectedCallError as error:
            raise UpstreamHTTPError(400, {"error": {"message": str(error)}}) from error


class _Server(BoundedServer):
    """Leaves the signals of this process alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def admit_call(scope: Scope, key: str) -> Admitted:
    """Admit a request of a client with a valid key, if it calls or lists the model.

    Raises RejectedError.
    """
    path, method = scope["path"], scope.get("method")
    if method in ("GET", "HEAD") and path == MODELS:
        return Admitted(client=key, max_bytes=0)
    if method == "POST" and _proxy_path(path) is not None:
        return Admitted(client=key, max_bytes=MAX_CALL_BYTES)
    known = ", ".join(f"/{each}" for each in CALLS.values())
    text = f"{method} {path!r:.80} is not served; the model is called by POST {known}"
    raise RejectedError(404, text)


def _proxy_path(path: str) -> str | None:
    """Return the path by which the proxy finds the dialect of a call; None if it is not a call."""
    if path.lower().endswith(GOOGLE_CALLS):
        return path.removeprefix("/")
    return next((known for end, known in CALLS.items() if path.endswith(end)), None)


def _caller(
    endpoint: Callable[[str, Request], Awaitable[Response]], only: str | None
) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        path = _proxy_path(request.url.path)
        assert path is not None  # It was admitted.
        parsed = ParsedRequest(request.scope, request.receive)
        body = await parsed.json()
        if (problem := check_shape(body)) is not None:
            return error_response(400, problem, request.url.path)
        asked = _named_model(path, body)
        if only is not None and asked not in ("", only):
            text = f"the model {asked!r:.80} does not exist here; this server has {only!r}"
            return error_response(404, text, request.url.path)
        answer = await endpoint(path, parsed)
        if answer.status_code < FIRST_ERROR:
            return answer
        text = error_text(bytes(answer.body).decode(errors="replace"))
        return error_response(answer.status_code, text, request.url.path)

    return call


def _named_model(path: str, body: dict[str, Any]) -> str:
    """Return the model that a call names, in Google's dialect in its path; "" if it names none."""
    if path.lower().endswith(GOOGLE_CALLS):
        return path.rpartition("/")[2].partition(":")[0]
    name = body.get("model")
    return name if isinstance(name, str) else ""


def _lister(name: str) -> Callable[[Request], JSONResponse]:
    """List the one model. Some programs look for theirs before they call it."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "openenv-pipe"}
    return lambda _: JSONResponse({"object": "list", "data": [model]})
