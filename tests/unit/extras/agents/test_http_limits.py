"""What clients of our servers may send: nothing before they are admitted, then within limits."""

import asyncio
import json
import socket
from contextlib import suppress

import httpx
import pytest
from clients import training_server
from test_served_model import Replies, served
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from openenv_pipe.extras.agents.http import gate
from openenv_pipe.system.http_server import BoundedServer, read_body
from openenv_pipe.system.server_side import openenv_pipe_limits as limits
from openenv_pipe.system.untrusted_json import MAX_VALUES, parse_request
from tests.ports import lasting_port

KEY = "the-key-of-the-tests"
LONG = 64 * 2**20
LIMIT_S = 20.0  # of a test that waits for something that does not come
UPGRADE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec_websocket_version": "13",
    "sec_websocket_key": "A" * 22 + "==",
}
CALL = {"messages": [{"role": "user", "content": "a word"}]}


def head(path="/v1/chat/completions", *, length=LONG, method="POST", **headers):
    """Return the head of a request; a header that is None is left out."""
    wanted = {"host": "127.0.0.1", "authorization": f"Bearer {KEY}", "content-length": length}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in {**wanted, **headers}.items()]
    sent = [line for line in lines if not line.endswith(": None")]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *sent, "", ""]).encode()


class Raw:
    """A connection whose bytes a test chooses."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def answer(self):
        """Return status and body of an answer, whose connection may stay open."""
        async with asyncio.timeout(LIMIT_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
            (length,) = [line for line in lines if line.startswith("content-length:")]
            body = await self.reader.readexactly(int(length.partition(":")[2]))
        return int(lines[0].split()[1]), body.decode()

    async def end(self):
        """Wait until the server closes the connection."""
        async with asyncio.timeout(LIMIT_S):
            try:
                while await self.reader.read(2**16):
                    pass
            except ConnectionResetError:
                return


@pytest.fixture
async def open_raw():
    """Yield a function that connects to a server and sends what it is given."""
    opened = []

    async def connected(url, data=b""):
        streams = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        opened.append(Raw(*streams))
        opened[-1].writer.write(data)
        return opened[-1]

    yield connected
    for each in opened:
        each.writer.transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
async def url():
    async with served(Replies("yes"), key=KEY) as (url, _):
        yield url


@pytest.fixture
def waits(monkeypatch):
    """Return a queue of the connections that have waited for their client as long as they may."""
    ended = asyncio.Queue()
    end_wait = limits.BoundedConnection._end_wait

    def noted(self):
        end_wait(self)
        ended.put_nowait(self)

    monkeypatch.setattr(limits.BoundedConnection, "_end_wait", noted)
    return ended


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (head(authorization=None), 401, "missing or wrong"),
        (head(authorization="Bearer x"), 401, "missing or wrong"),
        (head(authorization=None, x_api_key="\u00e9"), 401, "missing or wrong"),
        (head("/nothing", authorization=None), 401, "missing or wrong"),
        (head("/docs", authorization=None, method="GET"), 401, "missing or wrong"),
        (head(origin="http://other.example"), 403, "other.example"),
        (head(origin="null"), 403, "may send nothing"),
        (head(host="other.example"), 403, "other.example"),
        (head("/nothing"), 404, "/nothing"),
        (head(method="PUT"), 404, "PUT"),
        (head(), 413, "longer than"),
        (head(content_encoding="gzip"), 415, "gzip"),
    ],
)
async def test_a_request_is_rejected_before_its_body_is_there(url, open_raw, sent, status, reason):
    raw = await open_raw(url, sent)
    answer = await raw.answer()
    assert (answer[0], reason in answer[1]) == (status, True), answer


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/sessions", "/health"])
async def test_nothing_but_the_model_is_served(path):
    async with served(Replies("yes"), key=KEY) as (url, _), httpx.AsyncClient(base_url=url) as http:
        assert (await http.get(path)).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        assert (await http.get(path, headers=headers)).status_code == 404
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_whoever_has_no_key_of_an_episode_is_rejected_before_the_body_is_there(open_raw):
    """Of clients, programs, and their sessions."""
    async with training_server() as server:
        for path, status in (
            ("/rollouts", 401),
            ("/rollouts/sk-0/end", 404),
            ("/openenv/sk-0/step", 401),
            ("/openenv/sk-0/mcp", 401),
            ("/openenv/sk-0/ws", 401),
            ("/v1/chat/completions", 401),
            ("/v1beta/models/m:generateContent", 401),
        ):
            for wrong in (None, f"Bearer {KEY}"):
                raw = await open_raw(server.url, head(path, authorization=wrong))
                assert (await raw.answer())[0] == status, path


async def test_a_websocket_without_a_key_is_closed_at_its_handshake():
    async with training_server() as server:
        with pytest.raises(InvalidStatus, match="403"):
            await connect(f"{server.url.replace('http', 'ws')}/openenv/sk-0/ws")


async def test_a_websocket_ends_with_its_episode():
    async with training_server() as server, server.client() as client:
        collecting = server.collect()
        sockets = []
        for _ in range(2):
            async with client.rollout() as rollout:
                sockets.append(await connect(f"{rollout.env_url.replace('http', 'ws')}/ws"))
                await rollout.chat([CALL["messages"][0]])
                await rollout.finish(1.0)
        await collecting
        for socket in sockets:
            async with asyncio.timeout(LIMIT_S):
                await socket.wait_closed()


@pytest.mark.parametrize("frame", ["{", "[1]", "null", '{"type": []}', '{"type": "step"}', b"\0"])
async def test_a_malformed_frame_gets_an_error_frame(frame):
    async with training_server() as server, server.client() as client:
        collecting = server.collect()
        async with (
            client.rollout() as rollout,
            connect(f"{rollout.env_url.replace('http', 'ws')}/ws") as socket,
        ):
            await socket.send(frame)
            answer = json.loads(await socket.recv())
            assert (answer["type"], answer["data"]["code"]) == ("error", "VALIDATION_ERROR")
        collecting.cancel()


async def test_a_connection_that_sends_no_whole_headers_is_closed(url, open_raw, monkeypatch):
    monkeypatch.setattr(limits, "WAIT_S", 0.05)
    for begun in (b"", b"GET", head(length=2)[:-2], head(length=2) + b"{}" + head()[:-2]):
        raw = await open_raw(url, begun)
        await raw.end()


async def test_the_oldest_unknown_connection_makes_room(url, open_raw, monkeypatch):
    monkeypatch.setattr(limits, "MAX_WAITING", 3)
    monkeypatch.setattr(limits, "ROOM_S", 0.01)
    known = await open_raw(url, head("/v1/models", method="GET", length=0))
    assert (await known.answer())[0] == 200
    others = [await open_raw(url, b"GET") for _ in range(4)]
    for each in others[:2]:
        await each.end()
    listing = head("/v1/models", method="GET", length=0)
    for each, rest in ((known, listing), (others[-1], listing.removeprefix(b"GET"))):
        each.writer.write(rest)
        assert (await each.answer())[0] == 200


async def test_what_is_left_of_a_rejected_body_is_limited(url, open_raw, monkeypatch):
    monkeypatch.setattr(limits, "MAX_LEFT_BYTES", 1000)
    raw = await open_raw(url, head(authorization=None))
    assert (await raw.answer())[0] == 401
    raw.writer.write(b"a" * 2000)
    await raw.end()


async def test_what_is_no_http_behind_a_rejected_request_is_no_error_of_the_server(open_raw):
    """Or anybody could fill its log with tracebacks."""
    errors = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    async with served(Replies("yes"), key=KEY) as (url, _):
        begun = head(authorization=None, content_length=None, transfer_encoding="chunked")
        raw = await open_raw(url, begun)
        assert (await raw.answer())[0] == 401
        raw.writer.write(b"no length\r\n")
        await raw.end()
    assert errors == []


async def test_a_websocket_that_is_never_accepted_nor_rejected_is_closed(
    url, open_raw, monkeypatch
):
    """The library of WebSockets rejects long headers without a word."""
    monkeypatch.setattr(limits, "WAIT_S", 0.05)
    begun = head(method="GET", length=0, authorization=None, **UPGRADE)
    raw = await open_raw(url, begun[:-2] + b"x: " + b"a" * 12_000 + b"\r\n\r\n")
    await raw.end()


async def test_a_rejected_request_leaves_its_connection_usable():
    """A client with a wrong key reads why, also when it has sent a body."""
    async with served(Replies("yes"), key=KEY) as (url, _), httpx.AsyncClient(base_url=url) as http:
        body = {"messages": "a" * 200_000}
        for _ in range(2):
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 401


async def test_a_body_has_a_time_limit(url, open_raw, monkeypatch):
    monkeypatch.setattr(limits, "BODY_S", 0.05)
    for begun in (b"", b'{"messages":'):
        raw = await open_raw(url, head(length=100) + begun)
        assert (await raw.answer())[0] == 408
        await raw.end()


async def test_a_client_does_not_pay_for_the_time_of_an_application(open_raw, waits, monkeypatch):
    """An application that is busy before it reads a body lets its client wait."""
    monkeypatch.setattr(limits, "BODY_S", 0.02)

    async def app(scope, receive, send):
        await waits.get()
        body = await read_body(scope, receive, max_bytes=LONG)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % len(body)})

    server = BoundedServer(app, port=lasting_port(), lifespan="off", log_level="error")
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(LIMIT_S):
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.config.port}"
        raw = await open_raw(url, head(length=2**20) + b" " * 2**20)
        assert b" 200 " in await raw.reader.readuntil(b"\r\n")
        server.should_exit = True
        await serving


@pytest.mark.parametrize(
    ("number", "last"),
    [(1000, {}), (200, {"connection": "close"}), (200, UPGRADE)],
    ids=["reads nothing", "closes", "opens a WebSocket"],
)
async def test_a_client_without_a_key_that_takes_no_answers_is_closed(
    waits, monkeypatch, number, last
):
    """Or it would hold its connections, and the server's files, as long as it likes."""
    monkeypatch.setattr(limits, "WAIT_S", 0.2)
    made = limits.BoundedConnection.connection_made

    def with_small_buffer(self, transport):
        made(self, transport)
        own = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    monkeypatch.setattr(limits.BoundedConnection, "connection_made", with_small_buffer)
    listing = {"method": "GET", "length": 0, "authorization": None}
    async with served(Replies("yes"), key=KEY) as (url, _), asyncio.timeout(LIMIT_S):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", int(url.rpartition(":")[2])))
            await loop.sock_sendall(client, head(**listing) * number + head(**listing, **last))
            await waits.get()
            answers = b""
            with suppress(ConnectionResetError):
                while some := await loop.sock_recv(client, 2**16):
                    answers += some
    assert answers.count(b" 401 ") < number


async def test_a_body_in_parts_is_limited(url, open_raw, monkeypatch):
    monkeypatch.setattr("openenv_pipe.extras.agents.http.endpoint.MAX_CALL_BYTES", 1000)
    raw = await open_raw(url, head(length=None, transfer_encoding="chunked"))
    for _ in range(20):
        raw.writer.write(b"64\r\n" + b" " * 100 + b"\r\n")
    assert (await raw.answer())[0] == 413


@pytest.mark.parametrize(("name", "status"), [("MAX_OPEN_BY_CLIENT", 429), ("MAX_OPEN", 503)])
async def test_requests_at_once_are_limited(url, open_raw, monkeypatch, name, status):
    monkeypatch.setattr(gate, name, 1)
    first = await open_raw(url, head(length=2, expect="100-continue"))
    assert b" 100 " in await first.reader.readuntil(b"\r\n\r\n")  # It is being read.
    second = await open_raw(url, head(length=2))
    assert (await second.answer())[0] == status
    first.writer.write(b"{}")
    assert (await first.answer())[0] == 400
    second = await open_raw(url, head(length=2) + b"{}")
    assert (await second.answer())[0] == 400


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "nul", b"\xff", "\ufeff{}", "NaN", "[-Infinity]", "[1e999]"),
        *(f"[{2**63 + 1}]", f"[{'9' * 10_000}]", "[" * 100 + "]" * 100, "[" * 100_000),
        "[" + "0," * MAX_VALUES + "0]",
    ],
)
def test_json_that_a_server_could_not_compute_with_is_rejected(text):
    with pytest.raises(ValueError):
        parse_request(text)


def test_signs_within_texts_are_no_values():
    text = json.dumps([',[{:\\"' * MAX_VALUES])
    assert parse_request(text) == json.loads(text)
