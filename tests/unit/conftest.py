"""Time for tests of waits: it passes when nobody has anything to do, however busy the machine."""

import asyncio

import pytest


@pytest.fixture
async def virtual_time(monkeypatch):
    """The loop's clock stands still, and jumps to the next timer when nothing else is ready. Not
    for tests that wait for a thread or another process: time would run away from those."""
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
