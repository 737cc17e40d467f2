"""One WebSocket session with one environment, with a time limit for each message.

A session whose message was not answered properly (time limit, cancellation, closed connection,
invalid answer) is out of step with its environment and must not be used again. A session never
reconnects, never retries, and has one message in flight at a time.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.protocol import State

from openenv_pipe.environments.client.deadline import Deadline
from openenv_pipe.environments.client.protocol import (
    StepResult,
    error_of_frame,
    parse_frame,
    request_frame,
    step_result,
)
from openenv_pipe.environments.images import with_references
from openenv_pipe.errors import (
    ServerFullError,
    SessionClosedError,
    SessionError,
    SessionTimeoutError,
    StepRejectedError,
)
from openenv_pipe.system.http import LOOPBACK, OPEN, Access
from openenv_pipe.system.progress import LONG_WAIT_S
from openenv_pipe.system.untrusted_text import quoted
from openenv_pipe.types import Observation

_log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 2.0
LAST_LOOK_S = 0.05
RECENT_S = 1.0  # A server that answered this recently is not pinged.
HTTP_ONLY = "this is how a server without /ws answers, and plain HTTP keeps no episode"
REDIRECT = "redirects are not followed, because headers may be secret; name the final URL"
# What an HTTP status in place of a WebSocket means. FastAPI answers 403 where there is no /ws.
HINTS = {**dict.fromkeys((403, 404), HTTP_ONLY), **dict.fromkeys((301, 302, 307, 308), REDIRECT)}
# What to do if a message gets no answer, by the message's type.
LIMITS = {
    kind: f"; if it may take longer, raise env.{kind}_timeout_s" for kind in ("reset", "step")
}
TOO_BIG = 1009  # the WebSocket close code for a message over the size limit
LIST_TOOLS = {"type": "list_tools"}  # OpenEnv's action
LIST_TOOLS_RPC = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}  # MCP's form
WEBSOCKET_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class _Connect(connect):
    """Rejects redirects, which would carry secret headers to another host."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class EpisodeSession(Protocol):
    """What an episode is played in: a session, or a player's seat in one (`rollout.game`)."""

    async def reset(self, keywords: Mapping[str, Any], timeout_s: float) -> StepResult: ...
    async def step(self, action: Mapping[str, Any], timeout_s: float) -> StepResult: ...
    async def ask(
        self, kind: str, answer_kind: str, data: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]: ...


class Session:
    """One environment of one server. Create it with `connect`; one task at a time may use it."""

    __slots__ = (
        *("_connection", "_deadline", "_in_sync", "_last_answer_s", "_max_message_mb"),
        "url",
    )
    # When a long wait for a server was last logged, for all its sessions, in monotonic seconds.
    _told_s: ClassVar[dict[str, float]] = {}

    def __init__(self, url: str, connection: ClientConnection, max_message_mb: int) -> None:
        self.url = url
        self._connection = connection
        self._max_message_mb = max_message_mb
        self._last_answer_s: float | None = None  # None: no answer yet, as with a full server
        self._in_sync = True  # False from sending a message until its proper answer
        self._deadline = Deadline(self._tell_long_wait)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        timeout_s: float,
        max_message_mb: int,
        access: Access = OPEN,
    ) -> Self:
        """Open a session with the server at `url`.

        The URL is http, https, ws or wss (`/ws` is added), or unix:///path/of/socket. A full
        server accepts the connection; the first message then raises ServerFullError.

        Raises:
            SessionTimeoutError: There is no connection within `timeout_s`.
            SessionClosedError: The server rejects the connection.
            ValueError: `url` is not a URL.
        """
        address = websocket_url(url)
        options: dict[str, Any] = {}
        if (parts := urlsplit(url)).scheme == "unix":
            options = {"unix": True, "path": parts.path}
        if access.tls is not None and address.startswith("wss:"):
            options["ssl"] = access.tls
        try:
            connection = await _Connect(
                address,
                **options,
                additional_headers=access.headers,
                compression=None,  # Compression costs more than half of the throughput.
                proxy=None if urlsplit(address).hostname in LOOPBACK else True,
                max_size=max_message_mb * 2**20,
                open_timeout=timeout_s,
                # Pings keep tunnels open. A missing pong proves nothing, because an optimizer
                # step may have blocked our event loop; each message has its own time limit.
                ping_interval=20.0,
                ping_timeout=None,
                close_timeout=CLOSE_LIMIT_S,
            )
        except TimeoutError:
            raise SessionTimeoutError(f"{address}: no connection within {timeout_s:g} s") from None
        except (OSError, WebSocketException) as error:
            status = error.response.status_code if isinstance(error, InvalidStatus) else None
            hint = f"; {HINTS[status]}" if status in HINTS else ""
            raise SessionClosedError(f"{address}: cannot connect: {error}{hint}") from error
        return cls(address, connection, max_message_mb)

    @property
    def usable(self) -> bool:
        """True if the connection is open and every message so far got one proper answer."""
        is_open = self._connection.state is State.OPEN
        return self._in_sync and is_open and not self._connection.recv_messages.frames

    async def reset(self, keywords: Mapping[str, Any], timeout_s: float) -> StepResult:
        """Start an episode. Raises as `step` does."""
        return await self._result(await self.ask("reset", "observation", keywords, timeout_s))

    async def step(self, action: Mapping[str, Any], timeout_s: float) -> StepResult:
        """Take one action.

        Raises:
            StepRejectedError: The environment rejected the action; the session stays usable.
            SessionError: The session failed and is not usable any more: ServerFullError,
                SessionTimeoutError, SessionClosedError, or an answer that breaks the protocol.
        """
        return await self._result(await self.ask("step", "observation", action, timeout_s))

    async def state(self, timeout_s: float) -> dict[str, Any]:
        """Read the environment's state, the cheapest message without effect. Raises as `step`."""
        return await self.ask("state", "state", None, timeout_s)

    async def is_responsive(self, timeout_s: float) -> bool:
        """Return whether the session is usable and the server alive. Never raises.

        The server is pinged unless it answered within the last `RECENT_S`. A ping does not reach
        the environment inside the server.
        """
        if not self.usable:
            return False
        if self._last_answer_s is not None and time.monotonic() - self._last_answer_s < RECENT_S:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await (await self._connection.ping())
        except (TimeoutError, ConnectionClosed):
            return False
        return self.usable

    def doubt(self) -> None:
        """Let `is_responsive` ping the server, however recently it has answered."""
        if self._last_answer_s is not None:
            self._last_answer_s = -math.inf

    async def close(self) -> None:
        """Close the connection within `CLOSE_LIMIT_S`. Never raises; may be called again."""
        self._in_sync = False
        self._deadline.stop()
        await self._connection.close()

    async def ask(
        self, kind: str, answer_kind: str, data: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        """Send a message of type `kind` and return its answer's `data`. Raises as `step` does."""
        # Half of the limit, because the answer may repeat what was sent.
        text = request_frame(kind, data, self._max_message_mb * 2**19)
        if not self._in_sync:
            raise SessionClosedError(f"{self.url}: session is closed or out of step")
        self._in_sync = False
        if self._connection.recv_messages.frames:
            raise await self._unasked_frame(kind)
        frame = parse_frame(await self._exchange(kind, text, timeout_s), self.url)
        self._last_answer_s = time.monotonic()
        data = frame.get("data")
        if frame.get("type") == answer_kind and type(data) is dict:
            self._in_sync = True
            return data
        rejected = error_of_frame(frame, kind, self.url)
        self._in_sync = isinstance(rejected, StepRejectedError)
        raise rejected

    async def _exchange(self, kind: str, text: str, timeout_s: float) -> str | bytes:
        """Send one message and receive one; raise typed errors for silence and lost connections."""
        started_s = time.monotonic()
        try:
            try:
                with self._deadline.within(timeout_s):
                    await self._connection.send(text)
                    return await self._connection.recv()
            except TimeoutError:
                # If our own event loop was blocked, the answer came in time and is waiting.
                async with asyncio.timeout(LAST_LOOK_S):
                    return await self._connection.recv()
        except TimeoutError:
            waited_s = time.monotonic() - started_s
            raise SessionTimeoutError(
                f"{self.url}: no answer to {kind} within {timeout_s:g} s (waited {waited_s:.1f} s)"
                f"{LIMITS.get(kind, '')}"
            ) from None
        except ConnectionClosed as closed:
            raise await self._why_closed(kind, closed) from closed

    def _tell_long_wait(self, waited_s: float) -> None:
        """Log that the server has not answered for a long time."""
        now_s = time.monotonic()
        if now_s - self._told_s.get(self.url, -LONG_WAIT_S) >= LONG_WAIT_S:
            self._told_s[self.url] = now_s
            _log.warning("%s has not answered for %.0f s; still waiting", self.url, waited_s)

    async def _unasked_frame(self, kind: str) -> SessionError:
        """Turn a frame that came before its request into an error: it answers nothing.

        Taken for the answer to the next request, it would give a step another step's reward.
        """
        frame = parse_frame(await self._connection.recv(), self.url)
        error = error_of_frame(frame, kind, self.url)
        if frame.get("type") == "error" and not isinstance(error, StepRejectedError):
            return error  # A server that is full, or ends a session, says so unasked.
        return SessionError(
            f"{self.url}: the server sent a frame of type {quoted(str(frame.get('type')))} before "
            f"it was asked to {kind}, so answers can no longer be told apart; fix the "
            "environment's server, which has to answer each message once"
        )

    async def _why_closed(self, kind: str, closed: ConnectionClosed) -> SessionError:
        """Turn a closed connection into an error.

        A full server sends an error frame before it closes; without one, the cause is guessed.
        """
        with suppress(ConnectionClosed):
            frame = parse_frame(await self._connection.recv(), self.url)
            if frame.get("type") == "error":
                return error_of_frame(frame, kind, self.url)
        if closed.rcvd_then_sent and closed.rcvd is not None and closed.rcvd.code == TOO_BIG:
            return SessionClosedError(
                f"{self.url}: the {kind} is larger than the server's own limit; raise that "
                "(uvicorn: --ws-max-size, in bytes), or lower env.max_reply_tokens"
            )
        if closed.sent is not None and closed.sent.code == TOO_BIG:
            return SessionClosedError(
                f"{self.url}: a message is larger than env.max_message_mb={self._max_message_mb}; "
                "raise that limit"
            )
        if self._last_answer_s is None and closed.rcvd is not None and closed.rcvd.code == 1000:
            return ServerFullError(
                f"{self.url}: closed without an answer to the first message, as a full server does"
            )
        return SessionClosedError(f"{self.url}: connection lost at {kind}: {closed}")

    async def _result(self, data: dict[str, Any]) -> StepResult:
        """Read the answer to reset or step; an invalid one makes the session unusable."""
        try:
            result = step_result(data, self.url)
        except SessionError:
            self._in_sync = False
            raise
        observation = await with_references(result.observation)
        return (
            result
            if observation is result.observation
            else replace(result, observation=observation)
        )


async def step_aside(
    session: EpisodeSession, timeout_s: float, action: Mapping[str, Any]
) -> Observation:
    """Take a step that is not the policy's, and return its observation without the reward.

    Environments whose action class has no `list_tools` are asked for their tools by an MCP
    message. Raises as `Session.step` does.
    """
    try:
        return (await session.step(action, timeout_s)).observation
    except StepRejectedError as rejection:
        if action != LIST_TOOLS or rejection.code != "VALIDATION_ERROR":
            raise
        with suppress(StepRejectedError):  # The server does not know the message either.
            answer = await session.ask("mcp", "mcp", LIST_TOOLS_RPC, timeout_s)
            if type(answer.get("result")) is dict:
                return answer["result"]
        raise


def websocket_url(url: str) -> str:
    """Return the WebSocket address of a server, `ws://host:port/ws`.

    Raises ValueError: `url` is not a URL of a server.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path:
        return "ws://localhost/ws"
    if parts.scheme not in WEBSOCKET_SCHEMES or not parts.netloc:
        raise ValueError(f"{url!r} is not a URL like http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/ws") + "/ws"
    return urlunsplit((WEBSOCKET_SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))
