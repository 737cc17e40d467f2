"""The key of environments' servers: who gets in, and how servers of any command come to ask."""

import asyncio
import base64
import logging
import os
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import httpx
import pytest

from openenv_pipe.environments.hosts import process as process_module
from openenv_pipe.environments.hosts.process import EnvProcess, ProcessHost
from openenv_pipe.system.secrets import SERVER_SIDE, redact
from openenv_pipe.system.server_side.openenv_pipe_key import OnlyTheHost

pytestmark = pytest.mark.slow

KEY = "a-key-of-this-test"
LIMIT_S = 60.0
PORT = 8123
OWN = ("host", f"127.0.0.1:{PORT}")
BEARER = ("authorization", f"Bearer {KEY}")
BASIC = ("authorization", "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode())
COOKIE = ("cookie", f"a=b; openenv_pipe_key_{PORT}={KEY}")

# An application in the form that each kind of server takes, and programs that serve it.
APP = """
import sys

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": kind + ".complete"})
            if kind.endswith("shutdown"):
                return
    if scope["path"] == "/read":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(sys.modules.get("seen")).encode()})

def wsgi(environ, start_response):
    start_response("200 OK", [])
    return [b""]

def make():
    return app

if __name__ == "__main__":
    import uvicorn

    uvicorn.run("app:app" if "workers" in sys.argv else app, port=int(sys.argv[1]),
        workers=2 if "workers" in sys.argv else None)
"""
LIMITED = """
from app import app, limits

limits.WAIT_S = limits.BODY_S = 0.05
"""
PLAIN = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Open(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Open).serve_forever()
"""
UVICORN = (sys.executable, "-m", "uvicorn", "--port", "{port}")
COMMANDS = {
    "module": (*UVICORN, "app:app"),
    "factory": (*UVICORN, "--factory", "app:make"),
    "WSGI": (*UVICORN, "--interface", "wsgi", "app:wsgi"),
    "reloading": (*UVICORN, "--reload", "app:app"),
    "workers": (*UVICORN, "--workers", "2", "app:app"),
    "run": (sys.executable, "app.py", "{port}"),
    "run with workers": (sys.executable, "app.py", "{port}", "workers"),
    "behind a shell": ("sh", "-c", f"{sys.executable} -m uvicorn --port {{port}} app:app; true"),
}


def asked(*headers, kind="http", path="/health", port=PORT, query=""):
    """Return the status of a request, the headers of the answer, and whether the app saw it."""
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "server": ("127.0.0.1", port)}
    scope |= {"headers": [(name.encode(), value.encode()) for name, value in headers]}
    scope |= {"query_string": query.encode()} | ({"method": "GET"} if kind == "http" else {})
    asyncio.run(OnlyTheHost(app)(scope, None, send))
    assert bool(passed) == (sent[0].get("status") == 200)
    return sent[0].get("status", sent[0]["type"]), dict(sent[0].get("headers", ()))


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENENV_PIPE_KEY", KEY)
    monkeypatch.setenv("OPENENV_PIPE_PORT", str(PORT))
    monkeypatch.delenv("OPENENV_PIPE_HOSTS", raising=False)


@pytest.mark.parametrize(
    "path", ["/", "/health", "/docs", "/openapi.json", "/reset", "/web", "/mcp"]
)
def test_every_path_of_an_environment_needs_the_key(path):
    for wrong in ((), (("authorization", "Bearer x"),), (("cookie", f"openenv_pipe_key_1={KEY}"),)):
        assert asked(OWN, *wrong, path=path)[0] == 401
    for right in (BEARER, BASIC, COOKIE, ("x-api-key", KEY)):
        assert asked(OWN, right, path=path)[0] == 200


def test_a_session_without_the_key_is_closed_before_it_opens():
    assert asked(OWN, kind="websocket", path="/ws")[0] == "websocket.close"
    assert asked(OWN, BEARER, kind="websocket", path="/ws")[0] == 200


@pytest.mark.parametrize("header", ["Basic", "Basic !", "Basic eA==", "basic", "Bearer", "é"])
def test_malformed_credentials_are_rejected(header):
    assert asked(OWN, ("authorization", header))[0] == 401


def test_a_page_of_another_site_is_rejected_with_a_browser_s_cookie():
    assert asked(OWN, COOKIE, ("origin", "http://127.0.0.1:9"))[0] == 403
    assert asked(("host", "evil.example"), COOKIE)[0] == 403
    assert asked(OWN, COOKIE, ("origin", f"http://{OWN[1]}"))[0] == 200


def test_a_browser_gets_its_cookie_by_the_link():
    assert asked(OWN, path="/web", query="key=wrong")[0] == 401
    status, headers = asked(OWN, path="/web", query=f"key={KEY}")
    assert status == 303 and headers[b"location"] == b"/web"  # the address bar loses the key
    assert b"HttpOnly" in headers[b"set-cookie"] and b"SameSite=Strict" in headers[b"set-cookie"]
    cookie = ("cookie", headers[b"set-cookie"].partition(b";")[0].decode())
    assert asked(OWN, cookie, path="/web")[0] == 200


def test_servers_that_an_environment_starts_for_itself_need_no_key():
    assert asked(("host", "127.0.0.1:9"), port=9)[0] == 200


def settings(command, **variables):
    env = SimpleNamespace(name="env", package=None, python=None, variables=variables)
    env.command, env.max_message_mb, env.reset_timeout_s = list(command), 1, 5.0
    host = SimpleNamespace(type="process", num_servers=1, sessions_per_server=1, port=None)
    host.start_timeout_s, host.stop_timeout_s, host.max_restarts = 60.0, 2.0, 0
    return env, host


@pytest.mark.parametrize("name", COMMANDS)
async def test_a_server_of_uvicorn_asks_for_the_key_whatever_its_command(
    name, tmp_path, monkeypatch
):
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    server = EnvProcess(*settings(COMMANDS[name]), 0, tmp_path / "env.log", KEY)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for path in ("/", "/health", "/ws", "/reset", "/docs", "/openapi.json"):
                assert (await client.get(path)).status_code == 401
            headers = {"Authorization": f"Bearer {KEY}"}
            assert (await client.get("/", headers=headers)).status_code == 200
    finally:
        await server.stop()
    assert KEY not in " ".join(COMMANDS[name])


@pytest.mark.parametrize("parser", ["h11", "httptools"])
async def test_a_server_of_uvicorn_limits_connections_and_bodies(parser, tmp_path, monkeypatch):
    (tmp_path / "app.py").write_text(APP + "import openenv_pipe_limits as limits\n")
    (tmp_path / "limited.py").write_text(LIMITED)
    monkeypatch.chdir(tmp_path)
    given = ("--http", parser, "--timeout-keep-alive", "3600", "limited:app")
    server = EnvProcess(*settings((*UVICORN, *given)), 0, tmp_path / "env.log", KEY)
    await server.start()
    try:
        port = int(server.url.rpartition(":")[2])
        for begun in (b"", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\nx: " + b"a" * 40_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            async with asyncio.timeout(LIMIT_S):
                with suppress(ConnectionResetError):
                    await reader.read()
            writer.transport.abort()
        lines = (f"Host: 127.0.0.1:{port}", f"Authorization: Bearer {KEY}", "", "")
        request = "\r\n".join(("GET / HTTP/1.1", *lines)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(request)
            async with asyncio.timeout(LIMIT_S):
                assert b"200 OK" in await reader.readuntil(b"None")  # the end of its answer
            await asyncio.sleep(0.2)  # A connection that has shown the key stays open.
        writer.write(request.replace(b"GET / ", b"POST /read ")[:-2] + b"Content-Length: 9\r\n\r\n")
        async with asyncio.timeout(LIMIT_S):
            assert b" 408 " in await reader.read()
        writer.transport.abort()
    finally:
        await server.stop()


async def test_the_sitecustomize_of_a_user_runs_too(tmp_path, monkeypatch):
    (tmp_path / "app.py").write_text(APP)
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.modules['seen'] = 'it ran'\n")
    monkeypatch.chdir(tmp_path)
    parts = settings(COMMANDS["module"], PYTHONPATH=str(own))
    server = EnvProcess(*parts, 0, tmp_path / "env.log", KEY)
    await server.start()
    try:
        headers = {"Authorization": f"Bearer {KEY}"}
        assert httpx.get(server.url, headers=headers).text == "it ran"
        assert httpx.get(server.url).status_code == 401
    finally:
        await server.stop()


def test_a_python_process_without_uvicorn_loads_nothing_of_it():
    code = "import sys; print([n for n in ('uvicorn', 'openenv_pipe_key') if n in sys.modules])"
    variables = {**os.environ, "PYTHONPATH": str(SERVER_SIDE)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    assert done.stdout.strip() == b"[]" and done.stderr == b""


async def test_a_server_that_asks_for_no_key_is_reported(tmp_path, monkeypatch, caplog):
    async def open_all(_):
        pass

    monkeypatch.setattr(process_module.ProcessHost, "_open_all", open_all)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(APP)
    for command, is_open in (((sys.executable, "-c", PLAIN, "{port}"), True), (UVICORN, False)):
        caplog.clear()
        command = command if is_open else (*command, "app:app")
        host = ProcessHost(*settings(command), tmp_path / str(is_open))
        with caplog.at_level(logging.WARNING):
            await host.start()
        assert await host.is_protected() is not is_open
        await host.close()
        assert ("every user of this machine can use it" in caplog.text) is is_open
        assert host.key not in redact(f"it said {host.key}")


async def test_each_host_has_another_key(tmp_path):
    hosts = [ProcessHost(*settings(UVICORN), tmp_path) for _ in range(2)]
    assert hosts[0].key != hosts[1].key and len(hosts[0].key) >= 40
