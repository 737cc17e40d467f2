"""The HTTP client against faulty servers, and the URLs, headers and errors that it uses."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import (
    MAX_BYTES,
    Access,
    HttpClient,
    HttpError,
    _proxy_for,
    fetch,
    fetch_object,
)
from openenv_pipe.system.readiness import (
    NotReadyError,
    check_health,
    unless_dead,
    wait_until_healthy,
)

LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def serving(handler, *, socket: str | None = None):
    """Start a server that answers every request with `handler`, and yield its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.UnixSite(runner, socket) if socket else web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"unix://{socket}" if socket else f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def echo(request: web.Request) -> web.Response:
    body = await request.json() if request.can_read_body else None
    told = {"path": request.path, "method": request.method, "body": body}
    return web.json_response(told | {"token": request.headers.get("X-Token")})


async def drip(request: web.Request) -> web.StreamResponse:
    """Begin an answer and send it byte by byte without end."""
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b".")
            await asyncio.sleep(0.02)
    return response


async def test_a_server_that_answers_byte_by_byte_is_given_up_at_the_limit():
    async with serving(drip) as url:
        with pytest.raises(HttpError, match=r"no answer within 0\.3 s"):
            await asyncio.wait_for(fetch(url, "/", timeout_s=0.3), LIMIT_S)
        seen = await asyncio.wait_for(check_health(url, 0.3), LIMIT_S)
        assert seen == "no answer within 0.3 s"


async def test_requests_carry_headers_and_json(tmp_path):
    access = Access(headers={"X-Token": "secret"})
    for socket in (None, str(tmp_path / "s")):
        async with serving(echo, socket=socket) as url:
            posted = await fetch_object(
                url, "/a/b", timeout_s=LIMIT_S, access=access, body={"n": 1}
            )
            assert posted == {
                "path": "/a/b",
                "method": "POST",
                "body": {"n": 1},
                "token": "secret",
            }
            assert (await fetch_object(url, "/", timeout_s=LIMIT_S))["method"] == "GET"


async def test_redirects_are_not_followed():
    """A redirect would carry the headers to another host."""

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://elsewhere.invalid/")

    async with serving(redirect) as url:
        status, _ = await fetch(url, "/", timeout_s=LIMIT_S)
        assert status == 302
        with pytest.raises(ConfigError, match="status 302"):
            await fetch_object(url, "/", timeout_s=LIMIT_S)


async def test_content_is_cut_off_where_it_gets_too_long():
    async def flood(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (MAX_BYTES + 1000))

    async with serving(flood) as url:
        _, content = await fetch(url, "/", timeout_s=LIMIT_S)
        assert len(content) == MAX_BYTES
        async with HttpClient(url) as client:
            whole = await client.request("GET", "/", timeout_s=LIMIT_S)
        assert len(whole.content) == MAX_BYTES + 1000


async def test_what_breaks_is_one_kind_of_error():
    async def hang_up(request: web.Request) -> web.Response:
        request.transport.close()
        return web.Response()

    async with serving(hang_up) as url:
        with pytest.raises(HttpError):
            await fetch(url, "/", timeout_s=LIMIT_S)
    with pytest.raises(HttpError):  # no server listens there any more
        await fetch(url, "/", timeout_s=LIMIT_S)
    with pytest.raises(HttpError):
        await fetch("unix:///no/such/socket", "/", timeout_s=LIMIT_S)


def test_proxies_are_those_of_the_environment_but_not_for_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert _proxy_for("http://a.example") == "http://proxy:3128"
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://inside.example", "unix:///s"):
        assert _proxy_for(url) is None


# --- readiness ---------------------------------------------------------------------------------


async def test_a_server_is_waited_for_until_it_is_healthy():
    statuses = [503, 404, 200]

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=statuses.pop(0))

    async with serving(health) as url:
        await wait_until_healthy(url, timeout_s=LIMIT_S)
    assert statuses == []


async def test_a_server_of_this_program_is_reached_without_a_proxy(monkeypatch):
    """A pod by its service's name, say, on a machine whose environment names a proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("openenv_pipe.system.http.LOOPBACK", ())

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async with serving(health) as url:
        assert await check_health(url, LIMIT_S) is None
        assert await check_health(url, LIMIT_S, use_proxy=True) is not None


async def test_what_was_seen_last_is_told_at_the_time_limit():
    async def health(request: web.Request) -> web.Response:
        return web.Response(status=503)

    async with serving(health) as url:
        with pytest.raises(NotReadyError, match=r"within 0\.2 s, saw: 503"):
            await wait_until_healthy(url, timeout_s=0.2)
        with pytest.raises(NotReadyError, match=r"saw: 503; raise host\.start_timeout_s"):
            await wait_until_healthy(url, timeout_s=0.2, key="host.start_timeout_s")


async def test_a_death_ends_the_wait_even_if_another_server_answers():
    async def died() -> str:
        return "exit code 7"

    async def answer() -> None:
        """another server listens on the same port"""

    for step in (answer(), asyncio.sleep(LIMIT_S)):
        started = time.monotonic()
        with pytest.raises(NotReadyError, match="died before it was ready: exit code 7"):
            await unless_dead(step, died())
        assert time.monotonic() - started < LIMIT_S
