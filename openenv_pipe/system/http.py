"""The HTTP client, for environment servers, vLLM servers and model endpoints.

Redirects are not followed, because a redirect would send the headers, and with them credentials, to
another host. Nothing is retried. aiohttp is imported with the first request, so that commands
without one start quickly.
"""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.untrusted_json import parse_untrusted
from openenv_pipe.system.untrusted_text import quoted

if TYPE_CHECKING:
    import aiohttp

MAX_BYTES = 8 * 2**20  # of content that `fetch` returns; the rest is cut off
MAX_ERROR_LENGTH = 300  # characters of what a library says about a broken answer
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # hosts that are never reached through a proxy
IDLE_CONNECTION_S = 15.0  # how long an unused connection stays open


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Headers and TLS settings of every request to a server, also of those for a WebSocket."""

    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None  # None: the system's certificates, verified


OPEN = Access()  # for servers without access control


def bearer(key: str | None) -> Access:
    """Return the access that sends `key`; without a key, `OPEN`."""
    return Access(headers={"Authorization": f"Bearer {key}"}) if key else OPEN


class HttpError(OSError):
    """A request got no complete answer: the connection or TLS failed, or the time was up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A complete answer, whatever its status."""

    status: int
    headers: Mapping[str, str]  # names are case-insensitive
    content: bytes


class HttpClient:
    """Requests to one server, over connections that stay open. Use it in `async with`."""

    def __init__(
        self,
        url: str,
        access: Access = OPEN,
        *,
        idle_connection_s: float = IDLE_CONNECTION_S,
        use_proxy: bool = True,
    ) -> None:
        """Open no connection yet.

        Args:
            url: http://, https://, or unix:///path of a socket; paths of requests are appended.
            idle_connection_s: how long an unused connection stays open.
            use_proxy: send requests through the proxy that the environment variables name, if any.
        """
        parts = urlsplit(url)
        self._socket = parts.path if parts.scheme == "unix" else None
        self._url = "http://localhost" if self._socket else url.rstrip("/")
        self._access = access
        self._idle_connection_s = idle_connection_s
        self._proxy = _proxy_for(url) if use_proxy else None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "HttpClient":
        import aiohttp

        idle_s = self._idle_connection_s
        connector: aiohttp.BaseConnector
        if self._socket is not None:
            connector = aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=idle_s)
        else:
            tls = self._access.tls or True
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_s, ssl=tls)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=dict(self._access.headers),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # `request` has its own limit
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @property
    def is_closed(self) -> bool:
        """True before and after the `async with` block."""
        return self._session is None or self._session.closed

    async def request(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        body: Any = None,
        max_bytes: int | None = None,
    ) -> Response:
        """Send one request and read its answer. A cancellation closes the connection.

        Args:
            timeout_s: seconds for all of it: connecting, sending, and reading to the end.
            body: sent as JSON, unless it is None.
            max_bytes: content beyond it is cut off; None: there is no limit.

        Raises:
            HttpError: there is no complete answer within the time limit.
        """
        import aiohttp

        assert self._session is not None, "use the client in `async with`"
        sending = self._session.request(
            method, self._url + path, json=body, allow_redirects=False, proxy=self._proxy
        )
        try:
            async with asyncio.timeout(timeout_s), sending as response:
                return Response(
                    status=response.status,
                    headers=response.headers,
                    content=await _read(response, max_bytes),
                )
        except TimeoutError:
            raise HttpError(f"no answer within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise HttpError(self._describe(error.os_error)) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # aiohttp quotes in several lines what it cannot read.
            told = " ".join(str(error).split())[:MAX_ERROR_LENGTH]
            raise HttpError(told or type(error).__name__) from error

    def _describe(self, error: OSError) -> str:
        text = str(error) or type(error).__name__
        # A server without TLS closes the connection when the handshake begins.
        is_handshake = self._url.startswith("https:") and isinstance(error, ConnectionResetError)
        return f"SSL handshake failed: {text}" if is_handshake else text


async def fetch(
    url: str,
    path: str,
    *,
    timeout_s: float,
    access: Access = OPEN,
    body: Any = None,
    use_proxy: bool = True,
) -> tuple[int, bytes]:
    """Return status and content of `path` on the server at `url`, over a connection of its own.

    A `body` is posted as JSON; see `HttpClient` for the rest.

    Raises HttpError: there is no complete answer within the time limit.
    """
    async with HttpClient(url, access, use_proxy=use_proxy) as client:
        method = "GET" if body is None else "POST"
        response = await client.request(
            method, path, timeout_s=timeout_s, body=body, max_bytes=MAX_BYTES
        )
    return response.status, response.content


async def fetch_object(
    url: str,
    path: str,
    *,
    timeout_s: float,
    access: Access = OPEN,
    body: Any = None,
    server: str = "an OpenEnv server",
) -> dict[str, Any]:
    """Return the JSON object at `path` of a server. See `fetch`.

    server: what is expected there, for messages.

    Raises ConfigError: there is no answer, or one of another kind.
    """
    address = url.rstrip("/") + path
    try:
        status, content = await fetch(url, path, timeout_s=timeout_s, access=access, body=body)
        answer = parse_untrusted(content) if status == 200 else None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {address}: {error}; expected {server} that is running"
        ) from error
    if status != 200:
        raise ConfigError(
            f"{address} answered with status {status}, expected 200: {quoted(content)}"
        )
    if not isinstance(answer, dict):
        raise ConfigError(f"{address} answered with {quoted(repr(answer))}, expected a JSON object")
    return answer


async def _read(response: "aiohttp.ClientResponse", max_bytes: int | None) -> bytes:
    if max_bytes is None:
        return await response.read()
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) >= max_bytes:
            break
    return bytes(content[:max_bytes])


def _proxy_for(url: str) -> str | None:
    """Return the proxy that HTTP_PROXY, HTTPS_PROXY and NO_PROXY name for the URL, if any."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    if parts.hostname is None or parts.hostname in LOOPBACK or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)
