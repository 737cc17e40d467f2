"""How an environment server is reached: what a request carries, and one plain HTTP request.

Refused here: following redirects, which would carry headers to another host; and retrying.
"""

import asyncio
import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from openenv_pipe.errors import ConfigError

MOST_BYTES = 8 * 2**20
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # never asked for through a configured proxy


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """What every request to a server carries, WebSockets included."""

    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None  # None: the system's certificates, verified


OPEN = Access()  # to all who ask


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None makes the redirect itself the answer."""


async def ask(
    url: str, path: str, *, timeout_s: float, access: Access = OPEN, body: Any = None
) -> tuple[int, bytes]:
    """Status and content of `path` on the server at `url` (http, https, or a unix socket's).

    A body is posted as JSON. Raises OSError if there is no answer within the limit, or no trust.
    """
    headers = dict(access.headers)
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    request = _ask_unix if urlsplit(url).scheme == "unix" else _ask_http
    async with asyncio.timeout(timeout_s):
        return await asyncio.to_thread(request, url, path, headers, data, timeout_s, access.tls)


async def ask_object(
    url: str, path: str, *, timeout_s: float, access: Access = OPEN, body: Any = None
) -> dict[str, Any]:
    """The JSON object at `path`. Raises ConfigError for any other answer, or none."""
    where = url.rstrip("/") + path
    try:
        status, content = await ask(url, path, timeout_s=timeout_s, access=access, body=body)
        answer = json.loads(content) if status == 200 else None
    except (OSError, ValueError, http.client.HTTPException) as error:
        seen = str(error) or f"no answer within {timeout_s:g} s"
        raise ConfigError(
            f"cannot read {where}: {seen}; expected an OpenEnv server that is running"
        ) from error
    if status != 200:
        raise ConfigError(f"{where} answered with status {status}, expected 200: {content[:80]!r}")
    if not isinstance(answer, dict):
        raise ConfigError(f"{where} answered with {str(answer)[:80]!r}, expected a JSON object")
    return answer


def _ask_http(
    url: str,
    path: str,
    headers: dict[str, str],
    data: bytes | None,
    timeout_s: float,
    tls: ssl.SSLContext | None,
) -> tuple[int, bytes]:
    """See `ask`. Blocks."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({} if urlsplit(url).hostname in LOOPBACK else None),
        urllib.request.HTTPSHandler(context=tls),
        _NoRedirect,
    )
    request = urllib.request.Request(url.rstrip("/") + path, data, headers)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return response.status, response.read(MOST_BYTES)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read(MOST_BYTES)
    except urllib.error.URLError as error:  # its own text would be <urlopen error ...>
        raise error.reason if isinstance(error.reason, OSError) else error from None


def _ask_unix(
    url: str, path: str, headers: dict[str, str], data: bytes | None, timeout_s: float, _: Any
) -> tuple[int, bytes]:
    """See `ask`. Blocks."""
    connection = http.client.HTTPConnection("localhost", timeout=timeout_s)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(timeout_s)
        connection.sock.connect(urlsplit(url).path)
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        return response.status, response.read(MOST_BYTES)
    finally:
        connection.close()
