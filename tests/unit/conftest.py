"""A virtual clock for tests of waits: it advances only when no task is ready, however busy the
machine."""

import asyncio

import pytest


@pytest.fixture
async def virtual_time(monkeypatch):
    """Use a loop clock that stands still, and jumps to the next timer when nothing else is ready.

    Tests that wait for a thread or another process cannot use it: their timeouts would pass at
    once.
    """
    loop = asyncio.get_running_loop()
    select, now_s = loop._selector.select, loop.time()

    def select_and_jump(timeout_s):
        nonlocal now_s
        if timeout_s is None:
            return select(None)
        events = select(0)
        if not events:
            now_s += timeout_s
        return events

    monkeypatch.setattr(loop, "time", lambda: now_s)
    monkeypatch.setattr(loop._selector, "select", select_and_jump)
