"""Time limits for Python code of others, in the calling thread."""

import sys
from contextlib import suppress

import pytest

from openenv_pipe.system import time_limit
from openenv_pipe.system.time_limit import run_limited

LIMIT_S = 60
pytestmark = pytest.mark.usefixtures("no_hang")


def endless():
    while True:
        try:
            for _ in range(10**6):
                pass
        except Exception:  # What interrupts it is no such exception.
            pass


def test_an_endless_loop_is_interrupted():
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
            run_limited(endless, 0.01)


def test_results_and_errors_pass_through():
    assert run_limited(lambda: 5, 60.0) == 5
    with pytest.raises(ZeroDivisionError):
        run_limited(lambda: 1 // 0, 60.0)


def test_no_interruption_comes_after_the_call(monkeypatch):
    """Whenever the watchdog decides, the call has either a result or a TimeoutError."""
    monkeypatch.setattr(time_limit, "_POLL_S", 0.0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(20_000):
            with suppress(TimeoutError):
                assert run_limited(lambda: sum(range(50)), 1e-6) == 1225
    finally:
        sys.setswitchinterval(before)
    for _ in range(10**5):
        pass
    assert not time_limit._calls
