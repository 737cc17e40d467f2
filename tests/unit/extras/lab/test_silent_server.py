"""`env check` ends early only for a server that is there and answers nothing."""

import asyncio
from types import SimpleNamespace

import pytest

from openenv_pipe.extras.lab.check import check
from openenv_pipe.system.http import OPEN


async def holds_on(reader, writer):
    await reader.read()
    writer.close()


async def has_no_such_page(reader, writer):
    await reader.readline()
    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(("answer", "silent"), [(holds_on, True), (has_no_such_page, False)])
async def test_any_answer_is_one(monkeypatch, answer, silent):
    monkeypatch.setattr(check, "HEALTH_LIMIT_S", 0.3 if silent else 10.0)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await check._is_silent(SimpleNamespace(urls=[url], access=OPEN)) is silent
    gone = SimpleNamespace(urls=[url], access=OPEN)
    assert not await check._is_silent(gone), "its log says why"
    assert not await check._is_silent(SimpleNamespace(urls=[]))
