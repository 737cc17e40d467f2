"""ASGI middleware that decides who may send which request to a server that a run starts.

Other users of the machine, and web pages that its browsers show, reach every port of the loopback
interface. So every request needs the server's key, whatever its path, and a request that a page of
another site may have sent is rejected even with it.

vLLM imports this module by `--middleware openenv_pipe_key.CLASS`, and servers of environments by
`sitecustomize.py` beside it. Both have Python environments of their own, from Python 3.9 on, so it
imports nothing of openenv_pipe.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

STATE = "openenv_pipe.connection"  # of a request: its connection, as in openenv_pipe_limits.py
HOSTS = "OPENENV_PIPE_HOSTS"  # names of the server beside its addresses; *: any
GET, POST = "GET", "POST"


class _Access:
    """An ASGI application that passes on the requests that are allowed, and answers all others."""

    VARIABLE: ClassVar = "VLLM_API_KEY"  # the environment variable with the key

    def __init__(self, app: App) -> None:
        """Raises RuntimeError if there is no key."""
        key = os.environ.get(self.VARIABLE, "")
        if not key:
            raise RuntimeError(
                f"{self.VARIABLE} is not set: the server needs a key, which clients send"
            )
        self._app = app
        self._key = key.encode()
        self._hosts = {"localhost", *os.environ.get(HOSTS, "").lower().split(",")} - {""}

    def serves(self, method: str, path: str) -> bool:
        """Whether clients use this path. Overridden by each kind of server."""
        raise NotImplementedError

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif (problem := self._problem(scope)) is None:
            others = [each for each in scope["headers"] if each[0] != b"authorization"]
            scope["headers"] = [*others, (b"authorization", b"Bearer " + self._key)]  # vLLM's form
            await self._pass(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            status, text = problem
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": text})

    async def _pass(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, after which its connection may stay open."""
        if (connection := scope.get("state", {}).get(STATE)) is not None:
            connection.is_known = True
        await self._app(scope, receive, send)

    def _problem(self, scope: Message) -> tuple[int, bytes] | None:
        """Return status and text for a request that is rejected; None for one that is allowed."""
        if not self._has_key(scope["headers"]):
            return 401, b"the key is missing or wrong"
        texts = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = texts.get(b"host", "")
        if not self._is_own(host):
            return 403, b"the Host is not a name of this server"
        if b"origin" in texts and texts[b"origin"].partition("://")[2] != host:
            return 403, b"the request comes from a page of another site"
        if not self.serves(scope.get("method", GET), scope["path"]):
            return 404, b"this path is not served"
        return None

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether a header has the key, in the form of clients of OpenAI or Anthropic."""
        given = [value for name, value in headers if name == b"x-api-key"]
        for name, value in headers:
            scheme, _, token = value.partition(b" ")
            if name == b"authorization" and scheme.lower() == b"bearer":
                given.append(token)
        return any(hmac.compare_digest(each, self._key) for each in given)

    def _is_own(self, host: str) -> bool:
        """Whether a Host names this server: an address cannot be made to mean another machine."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if "*" in self._hosts or name in self._hosts:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class OnlyTheRun(_Access):
    """The access to a server of a run's policies: only requests that the run's client sends."""

    PATHS: ClassVar = {
        **dict.fromkeys(("/health", "/metrics", "/v1/models", "/server_info"), GET),
        "/get_world_size": GET,
        "/inference/v1/generate": POST,
        **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), POST),
        **dict.fromkeys(("/pause", "/resume", "/sleep", "/wake_up"), POST),
        **dict.fromkeys(("/reset_prefix_cache", "/reset_encoder_cache"), POST),
        **dict.fromkeys(("/collective_rpc", "/update_weight_version"), POST),
        **dict.fromkeys(("/init_weight_transfer_engine", "/update_weights"), POST),
        **dict.fromkeys(("/start_weight_update", "/finish_weight_update"), POST),
        "/shutdown_weight_transfer_engine": POST,
    }

    def serves(self, method: str, path: str) -> bool:
        return self.PATHS.get(path) == method


class OnlyClients(_Access):
    """The access to a server of a finished model: the paths of the public APIs."""

    PATHS: ClassVar = ("/health", "/metrics", "/version", "/tokenize", "/detokenize")
    PUBLIC = "/v1/"
    CHANGES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

    def serves(self, method: str, path: str) -> bool:
        is_public = path.startswith(self.PUBLIC) and path not in self.CHANGES
        return is_public or path in self.PATHS


class OnlyTheHost(_Access):
    """The access to an environment's server: every path, for the host that has started it.

    A browser sends the key as a cookie, which it gets at the first request, `?key=KEY`. Programs
    that cannot set a header send it as the password of HTTP's basic authentication.

    Only the port of the environment is protected. A program that it serves for itself at another
    port has clients that know no key.
    """

    VARIABLE = "OPENENV_PIPE_KEY"
    PORT = "OPENENV_PIPE_PORT"

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._port = os.environ.get(self.PORT, "")
        # Its name has the port, because browsers send a host's cookies to all ports.
        self._cookie = f"openenv_pipe_key_{self._port}".encode()

    def serves(self, method: str, path: str) -> bool:
        return True

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        if server and str(server[1]) != self._port:
            await self._pass(scope, receive, send)
        elif scope["type"] == "http" and self._is_in_query(scope):
            cookie = self._cookie + b"=" + self._key + b"; Path=/; HttpOnly; SameSite=Strict"
            page = quote(scope["path"]).encode()
            headers = [(b"location", page), (b"set-cookie", cookie)]
            await send({"type": "http.response.start", "status": 303, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await super().__call__(scope, receive, send)

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = []
        for name, value in headers:
            if name == b"authorization" and value[:6].lower() == b"basic ":
                with suppress(binascii.Error):
                    given.append(base64.b64decode(value[6:]).partition(b":")[2])
            elif name == b"cookie":
                pairs = (each.strip().partition(b"=") for each in value.split(b";"))
                given += [text for cookie, _, text in pairs if cookie == self._cookie]
        return super()._has_key(headers) or any(
            hmac.compare_digest(each, self._key) for each in given
        )

    def _is_in_query(self, scope: Message) -> bool:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
        return hmac.compare_digest(given.encode(), self._key)
