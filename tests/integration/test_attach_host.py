"""`AttachHost`: servers that others run, behind TLS and tokens, slow, full, gone and back."""

import asyncio
import json
import re
import socket
import ssl
import subprocess
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from shutil import which

import pytest
from websockets.asyncio.server import serve

from openenv_pipe.config.compose import compose
from openenv_pipe.environments.hosts.process import EnvProcess
from openenv_pipe.errors import ConfigError, HostError, SessionClosedError
from openenv_pipe.extras.attach.host import AttachHost, http_url
from openenv_pipe.system import readiness
from openenv_pipe.system.http import bearer
from openenv_pipe.system.readiness import check_health
from tests.ports import lasting_port
from tests.stub_server import started

TOKEN = "a-token-of-the-tests"
LIMIT_S = 60.0  # waits for what takes a moment on an idle machine


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(readiness, "OUTAGE_POLL_S", 0.05)


class Stub:
    """A server in this process. It counts sessions, can require a token and can delay its
    answers."""

    def __init__(self, *, limit=4, token=None, health=HTTPStatus.OK):
        self.limit, self.token, self.health = limit, token, health
        self.num_sessions = self.num_resets = 0
        self.may_reset = asyncio.Event()
        self.may_reset.set()
        self.connections = []

    def respond(self, connection, request):
        if self.token is not None and request.headers.get("Authorization") != self.token:
            return connection.respond(HTTPStatus.FORBIDDEN, "no")
        if request.path == "/env/health":
            return connection.respond(self.health, "fine")
        return None if request.path == "/env/ws" else connection.respond(HTTPStatus.NOT_FOUND, "")

    async def play(self, connection):
        self.num_sessions += 1
        self.connections.append(connection)
        try:
            if self.num_sessions > self.limit:
                data = {"code": "CAPACITY_REACHED", "message": f"{self.limit} in use"}
                return await connection.send(json.dumps({"type": "error", "data": data}))
            async for text in connection:
                kind = json.loads(text)["type"]
                if kind == "reset":
                    self.num_resets += 1
                    await self.may_reset.wait()
                data = {} if kind == "state" else {"observation": {}}
                answer = "state" if kind == "state" else "observation"
                await connection.send(json.dumps({"type": answer, "data": data}))
        finally:
            self.num_sessions -= 1

    @asynccontextmanager
    async def serving(self, port=0, tls=None):
        server = await serve(self.play, "localhost", port, process_request=self.respond, ssl=tls)
        scheme = "http" if tls is None else "https"
        try:
            yield f"{scheme}://localhost:{server.sockets[0].getsockname()[1]}/env"
        finally:
            server.close(close_connections=True)
            await server.wait_closed()


def settings(*urls, **changes):
    given = [f"host.{name}={value}" for name, value in changes.items()]
    config = compose(["conf=echo", "host=attach", f"host.urls=[{','.join(urls)}]", *given]).config
    return config.env, config.host


def attached(*urls, **changes):
    return started(AttachHost(*settings(*urls, **changes), Path("logs")))


async def rejection(*urls, **changes):
    with pytest.raises(HostError) as caught:
        async with asyncio.timeout(LIMIT_S), attached(*urls, **changes):
            pass
    return str(caught.value)


# --- playing -----------------------------------------------------------------------------------


async def test_a_real_server_is_used_and_left_running(tmp_path):
    config = compose(["conf=echo", "host.sessions_per_server=3"]).config
    server = EnvProcess(config.env, config.host, 0, tmp_path / "log", "its-key")
    try:
        await server.start()
        own = {"headers": "{Authorization: 'Bearer its-key'}"}
        assert "set host.headers" in await rejection(server.url)
        async with attached(server.url, sessions_per_server=3, **own) as host:
            async with host.session() as session:
                first = await session.reset({"seed": 1, "split": "train", "index": 0}, LIMIT_S)
            assert first.observation["letter"]
        assert await check_health(server.url, LIMIT_S, bearer("its-key")) is None
    finally:
        await server.stop()


async def test_episodes_go_to_the_servers_that_are_free():
    """While one server does not answer resets, the other plays all remaining episodes."""
    slow, fast = Stub(), Stub()
    slow.may_reset.clear()
    async with (
        slow.serving() as one,
        fast.serving() as other,
        attached(one, other.replace("http:", "ws:") + "/ws", sessions_per_server=2) as host,
    ):
        assert (host.capacity, list(host.urls)) == (4, [one, other])

        async def episode():
            async with host.session() as session:
                await session.reset({}, LIMIT_S)
            if fast.num_resets == 58:
                slow.may_reset.set()

        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(episode() for _ in range(60)))
        assert (slow.num_resets, fast.num_resets) == (2, 58)


async def test_headers_reach_health_and_sessions(monkeypatch):
    async with Stub(token=f"Bearer {TOKEN}").serving() as url:
        message = await rejection(url)
        assert "rejects access with status 403" in message
        monkeypatch.setenv("MY_TOKEN", TOKEN)
        # the override that the message advises
        (name, value) = re.search(r"'host\.(headers.*?)=(.*)'", message).groups()
        async with attached(url, **{name: value}) as host, host.session() as session:
            await session.reset({}, LIMIT_S)


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate for localhost."""
    if which("openssl") is None:
        pytest.skip("not installed: openssl, which makes the certificate")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    files = ["-keyout", "key.pem", "-out", "cert.pem"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        [*command.split(), *files, *names], cwd=tmp_path, check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return tmp_path / "cert.pem", context


async def test_tls_is_verified_unless_it_is_said_otherwise(certificate):
    path, context = certificate
    async with Stub().serving(tls=context) as url:
        assert "its certificate is not trusted" in await rejection(url)
        for changes in ({"ca_file": path}, {"verify_tls": "false"}):
            async with attached(url, **changes) as host, host.session() as session:
                await session.reset({}, LIMIT_S)
        with pytest.raises(ConfigError, match=r"host\.ca_file"):
            AttachHost(*settings(url, ca_file="/no/such/file"), Path("logs"))
    async with Stub().serving() as url:
        assert "TLS fails" in await rejection(url.replace("http:", "https:"))


# --- addresses without an OpenEnv server ---------------------------------------------------------


async def test_what_does_not_answer_as_a_server_is_explained():
    assert "check that the server runs" in await rejection(f"http://localhost:{lasting_port()}")
    async with Stub(health=HTTPStatus.NOT_FOUND).serving() as url:
        assert "/health answers 404" in await rejection(url)
    async with Stub().serving() as url:
        assert "expected 200 of an OpenEnv server" in await rejection(url.replace("/env", ""))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        assert "no answer within 0.2 s" in await rejection(url, connect_timeout_s=0.2)
    async with Stub(limit=1).serving() as url:
        assert "accepted 1 session" in await rejection(url, sessions_per_server=3)


async def test_a_page_without_sessions_is_no_server():
    def only_health(connection, request):
        found = request.path == "/health"
        return connection.respond(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND, "")

    async with serve(Stub().play, "localhost", 0, process_request=only_health) as server:
        url = f"http://localhost:{server.sockets[0].getsockname()[1]}"
        message = await rejection(url)
    assert "HTTP 404" in message
    assert "this is how a server without /ws" in message


@pytest.mark.parametrize(
    "urls", ["[]", "[localhost:8000]", "[http://me:word@a.example]", "[http://a,http://a]"]
)
def test_urls_that_are_none_are_rejected(urls):
    with pytest.raises(ConfigError, match=r"host"):
        compose(["conf=echo", "host=attach", f"host.urls={urls}"])


def test_addresses():
    assert http_url("wss://a.example/env/ws") == "https://a.example/env"
    assert http_url("http://a.example:1/") == "http://a.example:1"


# --- servers that end ----------------------------------------------------------------------------


async def test_a_server_that_comes_back_is_used_again_and_the_lost_session_is_not():
    port = lasting_port()
    async with Stub().serving() as other:
        staying = attached(other, f"http://localhost:{port}/env", max_outage_s=LIMIT_S)
        async with Stub().serving(port):
            host = await staying.__aenter__()
            sessions = [host.session() for _ in range(2)]
            lent = [await each.__aenter__() for each in sessions]
        (lost,) = [session for session in lent if str(port) in session.url]
        with pytest.raises(SessionClosedError):
            await lost.step({}, LIMIT_S)
        for each in sessions:
            await each.__aexit__(None, None, None)
        async with asyncio.timeout(LIMIT_S):
            while len(host.urls) > 1:
                await asyncio.sleep(0.02)
            for _ in range(3):  # episodes go on with the remaining server
                async with host.session() as session:
                    await session.reset({}, LIMIT_S)
            async with Stub().serving(port) as url:
                while len(host.urls) < 2:
                    await asyncio.sleep(0.02)
                assert url in host.urls
                async with host.session(), host.session():
                    pass
        await staying.__aexit__(None, None, None)


async def test_a_lost_connection_puts_the_other_sessions_of_its_server_in_doubt():
    """A dying server loses its connections one by one, so a late one still looks open."""
    stub = Stub()
    async with stub.serving() as url, attached(url, sessions_per_server=2) as host:
        async with host.session() as other, host.session() as lost:
            for session in (other, lost):
                await session.reset({}, LIMIT_S)
            for connection in stub.connections:
                connection.transport.pause_reading()  # It is silent and open.
            stub.connections[-1].transport.abort()
            with pytest.raises(SessionClosedError):
                await lost.step({}, LIMIT_S)
        host._pool._env = host._pool._env.model_copy(update={"reset_timeout_s": 0.2})
        async with host.session() as later:
            assert later is not other
            await later.reset({}, LIMIT_S)
        stub.connections[0].transport.resume_reading()


async def test_a_server_that_stays_away_ends_the_run():
    async with Stub().serving() as url:
        gone = attached(url, max_outage_s=0.3)
        host = await gone.__aenter__()
    with pytest.raises(HostError, match=r"no answer 3 times .*host\.max_outage_s=0\.3"):
        async with asyncio.timeout(LIMIT_S):
            while True:
                async with host.session():
                    await asyncio.sleep(0.05)
    await gone.__aexit__(None, None, None)
