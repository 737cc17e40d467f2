"""A virtual clock for tests of waits, and an end for tests that hang."""

import asyncio
import signal

import pytest


@pytest.fixture
def no_hang(request):
    """Turn a test that takes longer than its module's LIMIT_S into a failure."""

    def give_up(*_):
        raise TimeoutError(f"not done after {request.module.LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(request.module.LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
async def virtual_time(monkeypatch):
    """Use a loop clock that stands still, and jumps to the next timer when nothing else is ready.

    It advances only when no task is ready, however busy the machine is.
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


@pytest.fixture
def other_user(tmp_path, monkeypatch):
    """A function that makes us another user, or the same one on another machine."""

    def change():
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other_state"))

    return change
