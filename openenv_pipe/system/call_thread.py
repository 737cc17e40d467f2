"""A thread that makes calls for other threads, and delivers what the calls returned."""

import asyncio
import inspect
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.system.copies import copied


class Doorbell:
    """Has an event loop do something soon, whichever thread rings.

    Rings between two answers count as one: a busy loop wakes once for all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: Callable[[], None]) -> None:
        self._loop = loop
        self._answer = answer
        self._is_rung = False

    def ring(self) -> None:
        if not self._is_rung:
            self._is_rung = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        self._is_rung = False
        self._answer()


@dataclass(slots=True, eq=False)
class Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    notify: "Callable[[Call], None]"  # called in its thread, at the end
    returned: Any = None
    raised: BaseException | None = None
    began_s: float | None = None  # None: calls before it still run
    is_over: bool = False
    thread: "CallThread | None" = None  # the one that makes the call
    task: "asyncio.Task[Any] | None" = None  # what awaits an awaitable that the function returned
    waiter: "asyncio.Future[None] | None" = None  # of the event loop that waits for the end

    def left_s(self, limit_s: float) -> float:
        """Return how much of the limit is left; all of it before the call has begun."""
        return limit_s if self.began_s is None else self.began_s + limit_s - time.monotonic()

    async def wait(self, limit_s: float) -> None:
        """Wait until the call is over, for `limit_s` at most."""
        if self.is_over:
            return
        loop = asyncio.get_running_loop()
        self.waiter = loop.create_future()
        timer = loop.call_later(limit_s, self.wake)
        try:
            await self.waiter
        finally:
            timer.cancel()

    def wake(self) -> None:
        """End `wait`, in its event loop."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def run(self) -> None:
        """Call the function; if it returns an awaitable, a task of the running loop awaits that."""
        self.began_s = time.monotonic()
        try:
            returned = self.function(*self.arguments, **self.keywords)
            if inspect.isawaitable(returned):
                self.task = asyncio.get_running_loop().create_task(self._finish(returned))
                return
            self.returned = copied(returned)
        except BaseException as error:
            self.raised = error
        self._end()

    async def _finish(self, work: Awaitable[Any]) -> None:
        try:
            self.returned = copied(await work)
        except BaseException as error:
            self.raised = error
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self.notify(self)


class CallThread:
    """A daemon thread with an event loop, which makes calls in the order of their queue."""

    def __init__(self, name: str, calls: deque[Call]) -> None:
        self._calls = calls
        self._is_abandoned = False
        self._awaiting: set[asyncio.Task[Any]] = set()  # what functions returned to be awaited
        self._loop = asyncio.new_event_loop()
        self._doorbell = Doorbell(self._loop, self._make_queued)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def begin(self) -> None:
        """Begin the calls of the queue. May be called from any thread."""
        self._doorbell.ring()

    def _make_queued(self) -> None:
        """Make the calls of the queue. Each leaves it only now, when nothing blocks this thread."""
        for _ in range(len(self._calls)):
            if self._is_abandoned or not self._calls:
                return
            call = self._calls.popleft()
            call.thread = self
            call.run()
            if call.task is not None:
                self._awaiting.add(call.task)
                call.task.add_done_callback(self._end_awaiting)

    def cancel(self, call: Call) -> None:
        if call.task is not None:
            self._call(call.task.cancel)

    def end(self) -> None:
        """Begin no further call, and end the thread once it neither runs nor awaits anything."""
        self._is_abandoned = True
        self._call(self._end_awaiting)

    def _end_awaiting(self, task: "asyncio.Task[Any] | None" = None) -> None:
        self._awaiting.discard(task)
        if self._is_abandoned and not self._awaiting:
            self._loop.stop()

    def _call(self, function: Callable[[], Any]) -> None:
        """Call a function in the thread, unless it has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def where(self) -> str:
        """Return the line that the thread runs, "file.py:12"; empty if it waits for an event."""
        return line_of(self._thread.ident)


class EndedCalls:
    """The calls of one event loop that are over, and whose waiters are to be woken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._calls: deque[Call] = deque()
        self._doorbell = Doorbell(loop, self._wake_all)
        self.loop = loop

    def add(self, call: Call) -> None:
        """Wake whoever waits for a call. May be called from any thread."""
        self._calls.append(call)
        self._doorbell.ring()

    def _wake_all(self) -> None:
        while self._calls:
            self._calls.popleft().wake()


def line_of(thread: int | None) -> str:
    """Return the line that a thread runs, "file.py:12"; empty if it waits for an event."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None or frame.f_code.co_filename == selectors.__file__:
        return ""
    return at(frame.f_code.co_filename, frame.f_lineno)


def at(file: str, line: int | None) -> str:
    return f"{Path(file).name}:{line}"
