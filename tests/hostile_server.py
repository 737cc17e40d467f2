"""An environment server with more than two hundred ways to misbehave, one for each path.

`http://127.0.0.1:PORT/NUMBER` is the address of behaviour NUMBER: a fault at one point of the
protocol. Everything else that this address answers is right. Number 0 has no fault.
"""

import asyncio
import gzip
import json
import logging
import threading
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha1
from typing import Any

from aiohttp import WSMsgType, web

from tests.unit.test_hostile_schemas import BROKEN, HUGE

SECONDS_OF_SILENCE = 300.0
DRIP_S = 0.05
FIELD = {"type": "string", "description": "Any text"}
ACTION = {"type": "object", "properties": {"text": FIELD}, "required": ["text"]}
OBSERVATION = {"type": "object", "properties": {"text": FIELD, "done": {}, "reward": {}}}
TOOLS = {"tools": [{"name": "add", "description": "Adds", "input_schema": ACTION}]}
RIGHT = {
    "health": {"status": "healthy"},
    "schema": {"action": ACTION, "observation": OBSERVATION, "state": {}},
    "metadata": {"name": "hostile", "description": "An environment"},
    "state": {"type": "state", "data": {"step_count": 0}},
    "reset": {"type": "observation", "data": {"observation": {"text": "go"}, "done": False}},
    "step": {
        "type": "observation",
        "data": {"observation": {"text": "well", **TOOLS}, "reward": 1.0, "done": False},
    },
}
MESSAGES = ("state", "reset", "step")
CONTROLS = "\x00\x07\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\r\n# Heading\n<b>${oc.env:HOME}{{ 7 }}"

Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]
FrameFault = Callable[[web.Request, web.WebSocketResponse], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """A fault at a point: an HTTP path, `connect`, or the answer to a message."""

    point: str
    name: str
    fault: Any


# --- HTTP ---------------------------------------------------------------------------------------


async def silence(request: web.Request, *_: Any) -> Any:
    await asyncio.sleep(SECONDS_OF_SILENCE)
    return web.Response()


async def abort(request: web.Request, *_: Any) -> Any:
    request.transport.abort()
    return web.Response()


def raw(*parts: bytes, pause_s: float = 0.0) -> Fault:
    """Write bytes in place of an answer, and close the connection."""

    async def fault(request: web.Request, *_: Any) -> web.StreamResponse:
        for part in parts:
            if request.transport is None or request.transport.is_closing():
                break
            request.transport.write(part)
            await asyncio.sleep(pause_s)
        if request.transport is not None:
            request.transport.close()
        return web.Response()

    return fault


def body(content: bytes, status: int = 200, **headers: str) -> Fault:
    async def fault(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content, status=status, headers=headers)

    return fault


def document(value: Any) -> Fault:
    return body(json.dumps(value).encode())


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
TRANSPORT = {
    "silence": silence,
    "abort": abort,
    "status 401": body(b"no", 401),
    "status 404": body(b"\x1b[2J", 404),
    "status 500": body(b"x" * 100_000, 500),
    "redirect": body(b"", 302, Location="http://127.0.0.1:1/"),
    "drip": raw(HEAD + b"Content-Length: 10000\r\n\r\n", *[b"x"] * 6000, pause_s=DRIP_S),
    "drip of the head": raw(*[bytes([byte]) for byte in HEAD * 50], pause_s=DRIP_S),
    "garbage": raw(bytes(range(256)) * 8),
    "another protocol": raw(b"SSH-2.0-OpenSSH_9.9\r\n"),
    "half of it": raw(HEAD + b'Content-Length: 1000\r\n\r\n{"a": '),
    "negative length": raw(HEAD + b"Content-Length: -1\r\n\r\n{}"),
    "two lengths": raw(HEAD + b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}"),
    "bad chunks": raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}"),
    "endless header": raw(HEAD + b"X: " + b"y" * 300_000 + b"\r\n\r\n{}"),
    "many headers": raw(HEAD + b"X: y\r\n" * 50_000 + b"\r\n{}"),
    "control characters": raw(b"HTTP/1.1 503 \x1b[2J\x07\r\nX: \x1b\r\n\r\n"),
    "no gzip": body(b"nonsense", **{"Content-Encoding": "gzip"}),
    "gzip bomb": body(gzip.compress(b" " * 40_000_000), **{"Content-Encoding": "gzip"}),
}
CONTENTS = {
    "empty": body(b""),
    "no JSON": body(b"<html>hello</html>"),
    "no UTF-8": body(b'{"a": "\xff\xfe"}'),
    "a list": document([RIGHT["schema"]]),
    "null": document(None),
    "a number": document(7),
    "an infinite number": body(b'{"action": 1e999, "observation": NaN}'),
    "deep": body(b'{"a": ' * 5000 + b"1" + b"}" * 5000),
    "a bit deep": body(b'{"a": ' * 200 + b"1" + b"}" * 200),
    "huge integer": body(b'{"action": ' + b"9" * 5000 + b"}"),
    "9 MB": body(b'{"a": "' + b"x" * 9_000_000 + b'"}'),
    "many keys": document({CONTROLS + str(number): number for number in range(5000)}),
    "half a pair": body(b'{"action": {"description": "\\ud800"}, "observation": {}}'),
}
STRANGE = {
    "no fields": {"type": "object", "properties": {}},
    "an empty enum": {"properties": {"a": {"enum": []}}},
    "an enum of anything": {
        "properties": {"a": {"type": "string", "enum": [1, None, {}, CONTROLS]}}
    },
    "a strange name": {"properties": {CONTROLS: FIELD}},
    "an empty name": {"properties": {"": FIELD}},
    "a template as name": {"properties": {"x }}{{ 7 * 7": FIELD}},
    "a strange description": {"properties": {"text": {**FIELD, "description": CONTROLS}}},
    "a long description": {"properties": {"text": {**FIELD, "description": "x" * 500_000}}},
    "a keyword as name": {"properties": {"class": FIELD, "self": FIELD}},
    "tools": {"properties": {"type": {}, "tool_name": {}, "arguments": {}}},
    "a reference to elsewhere": {"properties": {"text": {"$ref": "http://127.0.0.1:1/x"}}},
    "metadata required": {"properties": {"metadata": {}}, "required": ["metadata"]},
}
STRANGE_METADATA = {
    "a list as name": {"name": [1], "description": {"a": 1}},
    "control characters": {"name": CONTROLS, "description": CONTROLS},
    "a long name": {"name": "x" * 300_000, "description": "y" * 300_000},
    "YAML": {"name": "a: [", "description": "---\n- !!python/object:os.system\n%TAG"},
}

# --- frames -------------------------------------------------------------------------------------


def frames(*contents: str | bytes) -> FrameFault:
    """Answer with these frames."""

    async def fault(request: web.Request, socket: web.WebSocketResponse) -> None:
        for content in contents:
            await (socket.send_bytes if isinstance(content, bytes) else socket.send_str)(content)

    return fault


def answers(observation: Any = None, **fields: Any) -> FrameFault:
    data = {"observation": {"text": "x"} if observation is None else observation} | fields
    return frames(json.dumps({"type": "observation", "data": data}))


def errors(code: Any, **fields: Any) -> FrameFault:
    return frames(json.dumps({"type": "error", "data": {"code": code, **fields}}))


def closing(code: int) -> FrameFault:
    async def fault(request: web.Request, socket: web.WebSocketResponse) -> None:
        await socket.close(code=code, message=b"\x1b[2J")

    return fault


async def ping_flood(request: web.Request, socket: web.WebSocketResponse) -> None:
    while True:
        await socket.ping(b"x" * 100)
        await asyncio.sleep(0.01)


async def frame_flood(request: web.Request, socket: web.WebSocketResponse) -> None:
    while True:
        await socket.send_str(json.dumps(RIGHT["step"]))
        await asyncio.sleep(0.001)


FRAMES: dict[str, Any] = {
    "silence": silence,
    "abort": abort,
    "close": closing(1000),
    "close with an error": closing(1011),
    "bytes that are no frame": raw(bytes(range(128, 256)) * 4),
    "a masked frame": raw(b"\x81\x82\x00\x00\x00\x00{}"),
    "a frame of 2**62 bytes": raw(b"\x81\x7f" + (2**62).to_bytes(8) + b"x" * 100),
    "a frame byte by byte": raw(b"\x81\x7e\x10\x00", *[b"x"] * 6000, pause_s=DRIP_S),
    "half a frame": raw(b"\x81\x7e\x10\x00{"),
    "no UTF-8": raw(b"\x81\x02\xff\xfe"),
    "ping flood": ping_flood,
    "frame flood": frame_flood,
    "two answers": frames(json.dumps(RIGHT["step"]), json.dumps(RIGHT["step"])),
    "bytes": frames(b"\xff\xfe\x00"),
    "no JSON": frames("hello " + CONTROLS),
    "empty": frames(""),
    "a list": frames("[1, 2]"),
    "null": frames("null"),
    "deep": frames("[" * 100_000),
    "a bit deep": answers(json.loads("[" * 100 + "]" * 100)),
    "3 MB": answers({"text": "x" * 3_000_000}),
    "no type": frames("{}"),
    "a strange type": frames(json.dumps({"type": CONTROLS * 1000, "data": {}})),
    "a type that is a list": frames('{"type": [1], "data": {}}'),
    "no data": frames('{"type": "observation"}'),
    "data that are a list": frames('{"type": "observation", "data": [1]}'),
    "no observation": frames('{"type": "observation", "data": {"reward": 1}}'),
    "a text as observation": answers("text"),
    "an empty observation": answers({}),
    "other types in it": answers({"text": {"a": [None, 1e300, True]}, "tools": 7, "error": [1]}),
    "strange fields": answers({"text": CONTROLS, CONTROLS: CONTROLS, "self": 1, "role": 2, "": 3}),
    "markup of the chat": answers({"text": "<|user|><|end|><|assistant|></tool_call>" * 1000}),
    "900 kB of text": answers({"text": "word " * 180_000}),
    "many fields": answers({f"f{number}": number for number in range(20_000)}),
    "half a pair": frames(
        '{"type": "observation", "data": {"observation": {"text": "\\ud800", "\\udfff": 1}}}'
    ),
    "numbers that are none": frames(
        '{"type": "observation", "data": {"observation": {"text": NaN, "a": [-Infinity]}}}'
    ),
    "a huge integer": frames(
        '{"type": "observation", "data": {"observation": {"text": %s}}}' % ("9" * 5000)
    ),
    **{
        f"reward {reward!r:.20}": answers(reward=reward)
        for reward in (1e308, -1e308, 1e15, 10**400, "1", [1], {"a": 1}, True, float("nan"))
    },
    **{f"done {done!r}": answers(done=done) for done in ("yes", [0], {"a": 1}, 7, None)},
    **{
        f"error {code}": errors(code, message=CONTROLS)
        for code in (
            *("EXECUTION_ERROR", "VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE"),
            *("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR", "SOMETHING_NEW", CONTROLS),
        )
    },
    "an error without code": frames('{"type": "error", "data": {}}'),
    "an error without data": frames('{"type": "error"}'),
    "an error with a list as code": errors([1], message={"a": 1}),
    "an error of 900 kB": errors("EXECUTION_ERROR", message="\x1b" * 150_000),
    "places that are numbers": errors("VALIDATION_ERROR", errors=[{"loc": 7, "msg": 8}]),
    "places that are objects": errors("VALIDATION_ERROR", errors=[{"loc": {"a": 1}, "msg": []}]),
    "errors that are a text": errors("VALIDATION_ERROR", errors="text"),
    "errors without end": errors("VALIDATION_ERROR", errors=[{"loc": ["a"] * 90}] * 900),
}


def upgrade(key: str | None) -> Fault:
    """Answer the handshake with this key, or the right one, and then say nothing."""

    async def fault(request: web.Request) -> web.StreamResponse:
        asked = request.headers.get("Sec-WebSocket-Key", "")
        right = b64encode(sha1(f"{asked}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest())
        answer = f"Sec-WebSocket-Accept: {right.decode() if key is None else key}\r\n\r\n"
        head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        request.transport.write((head + answer).encode())
        return await silence(request)

    return fault


CONNECT = {
    **{name: TRANSPORT[name] for name in ("silence", "abort", "garbage", "status 500", "redirect")},
    "status 403": body(b"no", 403),
    "drip of the head": TRANSPORT["drip of the head"],
    "a wrong key": upgrade("wrong"),
    "no answer to anything, not even to close": upgrade(None),
    "no upgrade": body(b"{}", 200),
    "101 without anything": raw(b"HTTP/1.1 101 Switching Protocols\r\n\r\n"),
}


def all_behaviours() -> list[Behaviour]:
    """Return behaviours without a fault, and then with every fault at every point where it can
    be."""
    tables: dict[str, dict[str, Any]] = {
        "health": TRANSPORT,
        "schema": TRANSPORT | CONTENTS,
        "metadata": TRANSPORT | CONTENTS,
        "connect": CONNECT,
        **dict.fromkeys(MESSAGES, FRAMES),
    }
    found = [Behaviour(point="none", name="none", fault=None)]
    found += [
        Behaviour(point=point, name=name, fault=fault)
        for point, table in tables.items()
        for name, fault in table.items()
    ]
    for key, schemas in (("action", BROKEN | HUGE | STRANGE), ("observation", STRANGE)):
        for name, schema in schemas.items():
            fault = document(RIGHT["schema"] | {key: schema})
            found.append(Behaviour(point="schema", name=f"{key}: {name}", fault=fault))
    for name, metadata in STRANGE_METADATA.items():
        found.append(Behaviour(point="metadata", name=name, fault=document(metadata)))
    return found


# --- the server ---------------------------------------------------------------------------------


class HostileServer:
    """Serves all behaviours at once, on an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.behaviours = all_behaviours()
        self.port = 0
        self._loop = asyncio.new_event_loop()

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.port}/{number}"

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._stop(runner), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{number}/{point}", self._handle)
        quiet = logging.getLogger("hostile server")
        quiet.disabled = True
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True, logger=quiet)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        return runner

    async def _stop(self, runner: web.AppRunner) -> None:
        await runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        behaviour = self.behaviours[int(request.match_info["number"])]
        point = request.match_info["point"]
        if point == "ws" and behaviour.point != "connect":
            return await self._serve_messages(request, behaviour)
        if behaviour.point == ("connect" if point == "ws" else point):
            return await behaviour.fault(request)
        return web.json_response(RIGHT[point])

    async def _serve_messages(
        self, request: web.Request, behaviour: Behaviour
    ) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        with suppress(ConnectionError):
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                kind = json.loads(message.data)["type"]
                if kind == behaviour.point:
                    await behaviour.fault(request, socket)
                else:
                    await socket.send_json(RIGHT[kind])
        return socket
