"""`Session` against small servers that speak the protocol, or break it as real servers do."""

import asyncio
import json
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest
from websockets.asyncio.server import serve
from websockets.utils import accept_key

from openenv_pipe.environments.client.protocol import (
    StepResult,
    error_details,
    is_wrong_return,
)
from openenv_pipe.environments.client.session import LIST_TOOLS, Session, step_aside, websocket_url
from openenv_pipe.errors import (
    ServerFullError,
    SessionClosedError,
    SessionError,
    SessionTimeoutError,
    StepRejectedError,
)
from openenv_pipe.system.http import Access

pytestmark = pytest.mark.slow

LIMIT_S = 60.0  # of what happens at once
FULL = {"message": "4 of 4 in use", "code": "CAPACITY_REACHED", "max_sessions": 4}


def answer(observation=None, reward=None, done=False, **more):
    """An observation frame."""
    data = {"observation": observation or {}, "reward": reward, "done": done} | more
    return json.dumps({"type": "observation", "data": data})


def error(code, message="bad", **more):
    return json.dumps({"type": "error", "data": {"message": message, "code": code} | more})


@asynccontextmanager
async def session_with(behave, *, max_message_mb=1, **options):
    """A session with a server that gives each connection to the coroutine `behave`."""
    async with serve(behave, "127.0.0.1", 0, **options) as server:
        port = server.sockets[0].getsockname()[1]
        session = await Session.connect(
            f"http://127.0.0.1:{port}", timeout_s=LIMIT_S, max_message_mb=max_message_mb
        )
        try:
            yield session
        finally:
            await session.close()


def answers(*frames, received=None):
    """A server that answers with the frames in turn, and then says nothing more."""

    async def behave(connection):
        for frame in frames:
            message = await connection.recv()
            if received is not None:
                received.append(json.loads(message))
            await connection.send(frame)
        await connection.wait_closed()

    return behave


async def test_the_frames_are_those_of_the_protocol():
    received = []
    frames = [
        answer({"word": "?", "metadata": {}}),
        answer({"word": "."}, reward=1, done=True, metadata={"a": 1}),
        json.dumps({"type": "state", "data": {"step_count": 1}}),
    ]
    async with session_with(answers(*frames, received=received)) as session:
        first = await session.reset({"seed": 7}, LIMIT_S)
        second = await session.step({"word": "crane"}, LIMIT_S)
        state = await session.state(LIMIT_S)
        assert session.usable
    assert received == [
        {"type": "reset", "data": {"seed": 7}},
        {"type": "step", "data": {"word": "crane"}},
        {"type": "state"},
    ]
    assert first == StepResult({"word": "?", "metadata": {}}, None, False)
    assert second == StepResult({"word": "."}, 1.0, True)
    assert state == {"step_count": 1}


async def test_images_of_observations_become_references():
    rows = [[[200, column, row] for column in range(40)] for row in range(32)]
    frames = [answer({"screen": rows, "score": 1}), answer({"screen": rows}, reward=1)]
    async with session_with(answers(*frames)) as session:
        first = (await session.reset({}, LIMIT_S)).observation
        second = (await session.step({}, LIMIT_S)).observation
    assert (first["screen"]["width"], first["screen"]["height"]) == (40, 32)
    assert first == second | {"score": 1}


async def test_binary_frames_are_read_too():
    async with session_with(answers(answer({"a": 1}).encode())) as session:
        assert (await session.step({}, LIMIT_S)).observation == {"a": 1}


async def test_a_full_server_answers_the_first_message():
    async with session_with(answers(error(**FULL))) as session:
        with pytest.raises(ServerFullError, match="4 of 4"):
            await session.reset({}, LIMIT_S)
        assert not session.usable


@pytest.mark.parametrize("client_waits_s", [0.0, 0.1])
async def test_a_full_server_sends_one_frame_unasked_and_closes(client_waits_s):
    async def behave(connection):
        await connection.send(error(**FULL))

    async with session_with(behave) as session:
        await asyncio.sleep(client_waits_s)
        with pytest.raises(ServerFullError, match="4 of 4"):
            await session.reset({}, LIMIT_S)
        assert not session.usable


async def test_a_clean_close_before_the_first_answer_is_a_full_server():
    async def behave(connection):
        await connection.recv()

    async with session_with(behave) as session:
        with pytest.raises(ServerFullError):
            await session.reset({}, LIMIT_S)


async def test_a_frame_that_nobody_asked_for_is_no_answer():
    async def behave(connection):
        await connection.send(answer({"stale": True}))

    async with session_with(behave) as session:
        await session._connection.wait_closed()
        with pytest.raises(SessionError):
            await session.reset({}, LIMIT_S)


async def test_a_step_that_is_answered_twice_ends_the_session_before_the_next_step():
    """The second frame's reward of 100 must not become the next step's."""

    async def behave(connection):
        async for _ in connection:
            await connection.send(answer(reward=1.0))
            await connection.send(answer(reward=100.0))
            sent.set()

    sent = asyncio.Event()
    async with session_with(behave) as session:
        assert (await session.reset({}, LIMIT_S)).reward == 1.0
        async with asyncio.timeout(LIMIT_S):
            await sent.wait()
            while session.usable:
                await asyncio.sleep(0.001)
        with pytest.raises(SessionError, match="before it was asked to step"):
            await session.step({}, LIMIT_S)
        assert not session.usable


@pytest.mark.parametrize("status", [HTTPStatus.FOUND, HTTPStatus.PERMANENT_REDIRECT])
async def test_redirects_are_not_followed(status):
    """They would carry secret headers to another host."""
    visited = []

    async def behave(connection):
        visited.append(connection.request.headers)

    async with serve(behave, "127.0.0.1", 0) as other:
        location = f"ws://127.0.0.1:{other.sockets[0].getsockname()[1]}/ws"

        def redirect(connection, request):
            response = connection.respond(status, "")
            response.headers["Location"] = location
            return response

        with pytest.raises(SessionClosedError, match="redirects are not followed"):
            async with session_with(behave, process_request=redirect):
                pass
    assert visited == []


async def test_a_clean_close_after_an_answer_is_a_close():
    async def behave(connection):
        await connection.recv()
        await connection.send(answer())
        await connection.recv()

    async with session_with(behave) as session:
        await session.reset({}, LIMIT_S)
        with pytest.raises(SessionClosedError):
            await session.step({}, LIMIT_S)
        assert not session.usable


async def test_a_server_that_dies_is_a_close():
    async def behave(connection):
        await connection.recv()
        connection.transport.abort()

    async with session_with(behave) as session:
        with pytest.raises(SessionClosedError):
            await session.reset({}, LIMIT_S)


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR", "A_NEW_ONE"])
async def test_other_error_frames_end_the_session_and_are_quoted(code):
    async with session_with(answers(error(code, "no such file"))) as session:
        with pytest.raises(SessionClosedError, match=f"{code}: no such file"):
            await session.reset({}, LIMIT_S)
        assert not session.usable


async def test_a_rejected_step_leaves_the_session_usable():
    details = [{"loc": ["word"], "msg": "Field required"}]
    frames = [error("EXECUTION_ERROR"), error("VALIDATION_ERROR", errors=details), answer()]
    async with session_with(answers(*frames)) as session:
        with pytest.raises(StepRejectedError) as rejected:
            await session.step({}, LIMIT_S)
        assert rejected.value.code == "EXECUTION_ERROR"
        with pytest.raises(StepRejectedError, match="word: Field required"):
            await session.step({}, LIMIT_S)
        assert session.usable
        assert await session.reset({}, LIMIT_S) == StepResult({}, None, False)


def listed(data):
    return json.dumps({"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1} | data})


async def test_tools_are_asked_for_in_mcps_words_where_they_are_no_action():
    tools, received = {"tools": [{"name": "add"}]}, []
    frames = [error("VALIDATION_ERROR"), listed({"result": tools}), answer({"text": "go on"})]
    async with session_with(answers(*frames, received=received)) as session:
        assert await step_aside(session, LIMIT_S, LIST_TOOLS) == tools
        assert await step_aside(session, LIMIT_S, {"text": "hello"}) == {"text": "go on"}
    assert [each["type"] for each in received] == ["step", "mcp", "step"]
    assert received[1]["data"]["method"] == "tools/list"


@pytest.mark.parametrize("second", [listed({"error": {"code": 1}}), error("UNKNOWN_TYPE")])
async def test_where_mcp_is_unknown_too_the_first_rejection_counts(second):
    async with session_with(
        answers(error("VALIDATION_ERROR", "no such action"), second)
    ) as session:
        with pytest.raises(StepRejectedError, match="no such action"):
            await step_aside(session, LIMIT_S, LIST_TOOLS)
        assert session.usable


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    "action",
    [
        {"x": float("nan")},
        {"x": {1, 2}},
        {"x": object()},
        {"x": "\ud800 half a surrogate pair"},
        {"x": 10**5000},
        {"x": "long" * 2**18},
        nested(50),
        nested(5000),
    ],
)
async def test_an_action_that_no_server_can_read_is_rejected_without_being_sent(action):
    async with session_with(answers(answer())) as session:
        with pytest.raises(StepRejectedError, match="step not sent") as rejected:
            await session.step(action, LIMIT_S)
        assert rejected.value.code == "INVALID_JSON"
        assert session.usable
        await session.step({"text": "\x00 é \U0001f600", "n": 10**400, "a": nested(20)}, LIMIT_S)


async def test_half_a_surrogate_pair_in_an_answer_becomes_a_question_mark():
    """Neither tokenizers nor files can take it."""
    text = '{"type": "observation", "data": {"observation": {"\\ud800": "\\uDFFF \\ud83d\\ude00"}}}'
    async with session_with(answers(text)) as session:
        seen = (await session.step({}, LIMIT_S)).observation
    assert seen == {"?": "? \U0001f600"}


@pytest.mark.parametrize(
    "frame",
    [
        "not json",
        b"\xff\xfe",
        "[" * 100_000,
        "[]",
        "null",
        '{"type": "observation"}',
        '{"type": "observation", "data": []}',
        '{"type": "state", "data": {}}',
        '{"type": "error", "data": null}',
        '{"type": "observation", "data": {"observation": "text"}}',
        '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
        '{"type": "observation", "data": {"observation": {}, "reward": -Infinity}}',
        '{"type": "observation", "data": {"observation": {}, "reward": "1"}}',
        '{"type": "observation", "data": {"observation": {}, "reward": %s}}' % ("9" * 400),
        '{"type": "observation", "data": {"observation": {}, "reward": 1e308}}',
        '{"type": "observation", "data": {"observation": {}, "reward": -1e16}}',
        '{"type": "observation", "data": {"observation": {}, "done": "false"}}',
        '{"type": "observation", "data": {"observation": {}, "done": [0]}}',
        '{"type": "observation", "data": {"observation": {"reward": 1, "done": true}}}',
        json.dumps({"type": "observation", "data": {"observation": nested(50)}}),
        '{"type": "observation", "data": {"observation": {"n": %s}}}' % ("9" * 5000),
    ],
)
async def test_an_answer_that_breaks_the_protocol_ends_the_session(frame):
    async with session_with(answers(frame, answer())) as session:
        with pytest.raises(SessionError) as caught:
            await session.step({}, LIMIT_S)
        assert caught.type is SessionError
        assert not session.usable
        with pytest.raises(SessionClosedError):
            await session.step({}, LIMIT_S)


@pytest.mark.parametrize("done", [None, False, 0, True, 1])
async def test_done_is_true_or_false(done):
    async with session_with(answers(answer(done=done))) as session:
        assert (await session.step({}, LIMIT_S)).done is bool(done)


async def test_a_late_answer_is_never_taken_for_the_next_one():
    is_late, has_come = asyncio.Event(), asyncio.Event()

    async def behave(connection):
        await connection.recv()
        await is_late.wait()
        await connection.send(answer({"late": True}))
        await (await connection.ping())  # answered after what was sent before it
        has_come.set()
        await connection.wait_closed()

    async with session_with(behave) as session:
        with pytest.raises(SessionTimeoutError, match=r"step within 0.05 s"):
            await session.step({}, 0.05)
        assert not session.usable
        is_late.set()
        await asyncio.wait_for(has_come.wait(), LIMIT_S)
        with pytest.raises(SessionClosedError):
            await session.step({}, LIMIT_S)


async def test_a_cancelled_message_makes_the_session_unusable():
    async with session_with(answers()) as session:
        waiting = asyncio.create_task(session.step({}, LIMIT_S))
        await asyncio.sleep(0)
        assert not session.usable
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not session.usable


async def test_a_second_message_in_flight_is_rejected():
    async with session_with(answers()) as session:
        waiting = asyncio.create_task(session.step({}, LIMIT_S))
        await asyncio.sleep(0)
        with pytest.raises(SessionClosedError):
            await session.step({}, LIMIT_S)
        waiting.cancel()


async def test_an_answer_that_came_while_our_event_loop_was_blocked_counts(monkeypatch):
    loop = asyncio.get_running_loop()
    time = loop.time

    async def behave(connection):
        await connection.recv()
        await connection.send(answer({"a": 1}))
        # The server shares our loop. For both it is after the limit now, as if they were blocked.
        monkeypatch.setattr(loop, "time", lambda: time() + 2 * LIMIT_S)
        await connection.wait_closed()

    async with session_with(behave) as session:
        assert (await session.step({}, LIMIT_S)).observation == {"a": 1}


async def test_an_answer_over_the_size_limit_names_the_key():
    frame = answer({"text": "x" * 2**20})
    async with session_with(answers(frame), max_message_mb=1) as session:
        with pytest.raises(SessionClosedError, match=r"env\.max_message_mb=1"):
            await session.reset({}, LIMIT_S)
    async with session_with(answers(frame), max_message_mb=2) as session:
        await session.reset({}, LIMIT_S)


async def test_a_server_s_own_limit_of_a_message_is_named():
    """Of a server that the run did not start, `env.max_message_mb` is not the limit."""
    async with session_with(answers(), max_size=100) as session:
        with pytest.raises(SessionClosedError, match="reset is larger than the server's own limit"):
            await session.reset({"text": "x" * 200}, 5)


async def test_only_a_usable_session_with_a_live_server_is_responsive():
    async def behave(connection):
        await connection.recv()

    async with session_with(behave) as session:
        assert await session.is_responsive(LIMIT_S)
        with pytest.raises(ServerFullError):
            await session.step({}, LIMIT_S)
        assert not await session.is_responsive(LIMIT_S)
    async with frozen_server(shakes_hands=True) as url:
        session = await Session.connect(url, timeout_s=LIMIT_S, max_message_mb=1)
        assert not await session.is_responsive(0.05)
        await session.close()


async def test_a_session_that_has_just_answered_needs_no_ping(monkeypatch):
    monkeypatch.setattr("openenv_pipe.environments.client.session.RECENT_S", LIMIT_S)
    async with session_with(answers(answer(), answer())) as session:
        await session.reset({}, LIMIT_S)
        asked = []
        ping = session._connection.ping
        monkeypatch.setattr(session._connection, "ping", lambda: asked.append(1) or ping())
        assert await session.is_responsive(LIMIT_S)
        assert asked == []
        monkeypatch.setattr("openenv_pipe.environments.client.session.RECENT_S", 0.0)
        assert await session.is_responsive(LIMIT_S)
        assert asked == [1]


async def test_a_death_right_after_an_answer_is_seen_without_a_ping():
    async def behave(connection):
        await connection.recv()
        await connection.send(answer())
        connection.transport.abort()

    async with session_with(behave) as session:
        await session.reset({}, LIMIT_S)
        await session._connection.wait_closed()
        assert not await session.is_responsive(LIMIT_S)


async def test_a_server_of_http_alone_is_told_from_one_that_is_not_there():
    def reject(connection, request):
        return connection.respond(HTTPStatus.FORBIDDEN, "")

    with pytest.raises(SessionClosedError, match="HTTP 403; this is how a server without /ws"):
        async with session_with(answers(), process_request=reject):
            pass


async def test_close_is_bounded_and_may_be_called_again():
    async with session_with(answers()) as session:
        await session.close()
        await session.close()
        assert not session.usable


@asynccontextmanager
async def frozen_server(*, shakes_hands):
    """The URL of a server that says nothing, or nothing after the handshake."""

    async def behave(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        if shakes_hands:
            key = request.split(b"Sec-WebSocket-Key: ")[1].split(b"\r\n")[0].decode()
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n"
                % accept_key(key).encode()
            )
        await reader.read()
        writer.close()

    async with await asyncio.start_server(behave, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_close_does_not_wait_for_a_frozen_server():
    async with frozen_server(shakes_hands=True) as url:
        session = await Session.connect(url, timeout_s=LIMIT_S, max_message_mb=1)
        async with asyncio.timeout(LIMIT_S):
            await session.close()


async def test_compression_is_off_and_headers_are_sent():
    seen = {}

    async def behave(connection):
        seen.update(connection.request.headers.raw_items())
        await connection.wait_closed()

    async with serve(behave, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        session = await Session.connect(
            url, timeout_s=LIMIT_S, max_message_mb=1, access=Access(headers={"Authorization": "x"})
        )
        await session.close()
    assert seen["Authorization"] == "x"
    assert "Sec-WebSocket-Extensions" not in seen


async def test_nobody_there_is_a_close_and_silence_a_time_out():
    async with frozen_server(shakes_hands=False) as url:
        with pytest.raises(SessionTimeoutError):
            await Session.connect(url, timeout_s=0.1, max_message_mb=1)
    with pytest.raises(SessionClosedError, match="cannot connect"):
        await Session.connect(url, timeout_s=LIMIT_S, max_message_mb=1)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/ws"),
        ("https://a.example/env/", "wss://a.example/env/ws"),
        ("ws://localhost:1/ws", "ws://localhost:1/ws"),
        ("wss://a.example?key=1", "wss://a.example/ws?key=1"),
    ],
)
def test_addresses(url, address):
    assert websocket_url(url) == address


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://a.example", "http://"])
def test_addresses_that_are_none(url):
    with pytest.raises(ValueError, match="is not a URL like"):
        websocket_url(url)


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        (None, ""),
        ([], ""),
        ("text", ""),
        ([1], ""),
        ([{"loc": None, "msg": None}], " (: None)"),
        ([{"loc": 7, "msg": "no"}], " (7: no)"),
        ([{"loc": "word", "msg": {}}], " (word: {})"),
        ([{"loc": ["a", 0, {}], "msg": "no"}], " (a.0.{}: no)"),
    ],
)
def test_error_details_take_anything(errors, text):
    assert error_details(errors) == text


async def test_an_endless_error_text_is_cut():
    async with session_with(answers(error("EXECUTION_ERROR", "x" * 900_000))) as session:
        with pytest.raises(
            StepRejectedError, match=r"x\.\.\. \(898,000 more characters\)"
        ) as rejected:
            await session.step({}, LIMIT_S)
        assert len(str(rejected.value)) < 2100


@pytest.mark.parametrize(
    ("name", "attribute", "words"),
    [
        ("tuple", "model_dump", "step() returned a tuple; OpenEnv wants the observation alone"),
        ("NoneType", "model_dump", "step() returned nothing; OpenEnv"),
        ("coroutine", "model_dump", "step() returned a coroutine, because it is `async def`"),
        ("Seen", "reward", "step() returned a Seen; OpenEnv"),
        ("Game", "board", None),
    ],
)
async def test_the_usual_cause_of_an_exception_is_said(name, attribute, words):
    message = f"'{name}' object has no attribute '{attribute}'"
    async with session_with(answers(error("EXECUTION_ERROR", message))) as session:
        with pytest.raises(StepRejectedError) as caught:
            await session.step({}, LIMIT_S)
    assert is_wrong_return(caught.value) is (words is not None)
    assert (words or message) in str(caught.value)
