"""Who may see the pages: whoever has the token of the viewer; and what a page may do.

Loopback is open to every user of the machine, so the token is needed there, too. The printed
link carries it; the answer moves it into a cookie and the address loses it. A page of another site
that makes its own name mean 127.0.0.1 (DNS rebinding) sends that name as Host, and is rejected.
Nothing that is loaded comes from elsewhere (Content-Security-Policy). What changes something is
sent as JSON, with the viewer's own address as Origin: a page of another site cannot send that.
"""

import hmac
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from openenv_pipe.extras.viewer.web.answers import Answer
from openenv_pipe.system.http_server import mark_known

COOKIE = "openenv_pipe_view_"  # and the port
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::([0-9]+))?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NO_TOKEN = (
    "This page needs the token of the running viewer. Open the link that `openenv-pipe view` "
    "printed in its terminal. Each start of the viewer makes a new token."
)
# A page that a link of another site opens is requested without the strict cookie, but what it loads
# is requested with it: so the script is served if the cookie is valid, and loads the page again.
NO_TOKEN_PAGE = f"""<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <title>Token needed · openenv-pipe</title>
    <script src="static/once_more.js" defer></script>
  </head>
  <body>
    <h1>Token needed</h1>
    <p>{NO_TOKEN.replace("`openenv-pipe view`", "<code>openenv-pipe view</code>")}</p>
    <p>The link looks like <code>http://127.0.0.1:8090/?token=TOKEN</code>. If you
    forward its port, replace the port in the link by that of this page's address.</p>
  </body>
</html>
"""


class Access:
    """ASGI middleware that rejects requests, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str | None, is_local: bool) -> None:
        """
        token: what a browser has to know; None: whoever reaches the server may see the pages.
        is_local: whether only this machine reaches the server, by one of its loopback names.
        """
        self._app = app
        self._token = token
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            rejection = self._rejection(HTTPConnection(scope))
            if rejection is None:
                mark_known(scope)
            await (rejection or self._app)(scope, receive, send_with_headers)
        else:  # No page opens a WebSocket.
            await WebSocketClose()(scope, receive, send)

    def _rejection(self, request: HTTPConnection) -> Response | None:
        """Return what is answered in place of the application, or None."""
        is_sent = request.scope["method"] not in ("GET", "HEAD")
        if is_sent and not _is_of_own_page(request.headers):
            return PlainTextResponse(
                "rejected: only the viewer's own pages may send something", status_code=403
            )
        name, port = _split_host(request.headers.get("host", ""))
        if self._is_local and name not in LOOPBACK:
            return PlainTextResponse(
                "rejected: the address names another host than this machine; use 127.0.0.1",
                status_code=403,
            )
        cookie = COOKIE + port
        if self._token is None or self._is_token(request.cookies.get(cookie, "")):
            return None
        if request.scope["path"] != "/":
            return Answer({"error": NO_TOKEN}, status_code=401)
        if self._is_token(request.query_params.get("token", "")):
            # Both the address and the cookie's path, which is left to the browser, are relative:
            # a proxy may have put a prefix in front of them.
            answer = RedirectResponse("./", status_code=303)
            answer.set_cookie(cookie, self._token, path=None, httponly=True, samesite="strict")
            return answer
        return HTMLResponse(NO_TOKEN_PAGE, status_code=401)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), (self._token or "").encode())


def _split_host(host: str) -> tuple[str, str]:
    """Return the name and the port of a Host header, by which a browser knows the server.

    Cookies are shared by all ports of a name, and a forwarded port differs from the server's own.
    """
    found = HOST.fullmatch(host)
    return (found[1].lower(), found[2] or "80") if found else ("", "80")


def _is_of_own_page(headers: Headers) -> bool:
    """Whether a page of this server sent the request; browsers let no other page send this."""
    origin = headers.get("origin", "").partition("://")[2]
    return (
        headers.get("content-type") == "application/json"
        and origin != ""
        and origin == headers.get("host")
    )
