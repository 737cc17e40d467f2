"""Who may see the pages: this machine's browser, or whoever has the token; and what a page may do.

A page of another site that makes its own name mean 127.0.0.1 (DNS rebinding) sends that name as
Host, and is refused. Nothing that is loaded comes from elsewhere (Content-Security-Policy). What
changes something is sent as JSON, with the viewer's own address as Origin: a page of another site
cannot send that.
"""

import hmac
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "openenv_pipe_view"
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


class Access:
    """ASGI middleware that refuses requests, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        """token: of a server that other machines reach; None: only this machine reaches it."""
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = self._refusal(scope) or self._app
            await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD") and not _is_of_own_page(headers):
            return PlainTextResponse(
                "refused: only the viewer's own pages may send something", status_code=403
            )
        if self._token is None:
            host = headers.get("host", "")
            name = host[: host.index("]") + 1] if "]" in host else host.partition(":")[0]
            if name.lower() in LOOPBACK:
                return None
            return PlainTextResponse(
                "refused: the address names another host than this machine; use 127.0.0.1",
                status_code=403,
            )
        if self._is_token(_cookie(headers)):
            return None
        if self._is_token(QueryParams(scope["query_string"]).get("token", "")):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        return PlainTextResponse(
            "this server needs its token: open the address that `openenv-pipe view` has printed",
            status_code=401,
        )

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), (self._token or "").encode())


def _is_of_own_page(headers: Headers) -> bool:
    """Whether a page of this server sent the request; browsers let no other page send this."""
    origin = headers.get("origin", "").partition("://")[2]
    return (
        headers.get("content-type") == "application/json"
        and origin != ""
        and origin == headers.get("host")
    )


def _cookie(headers: Headers) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""
