"""A time limit for untrusted Python code that may never return by itself.

An example is the chat template in a model's folder, whose loops may have no end. The code runs in
the calling thread, because a thread of its own would cost more than most calls take.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")
_POLL_S = 0.25


class _ExpiredError(BaseException):
    """What the watchdog raises in a thread. It passes through `except Exception`."""


class _Call:
    def __init__(self, limit_s: float) -> None:
        self.thread = threading.get_ident()
        self.end_s = time.monotonic() + limit_s
        self.is_interrupted = threading.Event()


_calls: dict[int, _Call] = {}
_watchdog: threading.Thread | None = None


def run_limited(call: Callable[[], _Result], limit_s: float) -> _Result:
    """Return what a call returns, if it does so within `limit_s` seconds.

    A single operation of the interpreter, such as a huge power, is not interrupted.

    Raises TimeoutError: It has not returned in time and was interrupted.
    """
    _start_watchdog()
    entry = _Call(limit_s)
    try:
        _calls[id(entry)] = entry
        try:
            return call()
        finally:
            # Whoever takes the entry out decides: this thread, or the watchdog.
            if _calls.pop(id(entry), None) is None:
                entry.is_interrupted.wait()
                _interrupt(entry.thread, None)
                raise _ExpiredError
    except _ExpiredError:
        raise TimeoutError(f"not done after {limit_s:g} s") from None


def _start_watchdog() -> None:
    """Start the watchdog, also in a process that was forked from one that had it."""
    global _watchdog
    if _watchdog is None or not _watchdog.is_alive():
        _watchdog = threading.Thread(target=_watch, name="time-limit", daemon=True)
        _watchdog.start()


def _watch() -> None:
    while True:
        time.sleep(_POLL_S)
        now_s = time.monotonic()
        for key, entry in list(_calls.items()):
            if now_s >= entry.end_s and _calls.pop(key, None) is not None:
                _interrupt(entry.thread, _ExpiredError)
                entry.is_interrupted.set()


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread at its next instruction; None: take back one not raised yet."""
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
