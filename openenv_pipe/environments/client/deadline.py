"""A time limit for one wait after another, at the price of one timer for all of them.

`asyncio.timeout` sets a timer for each wait and takes it back, which costs more than the rest of a
message to an environment. Here the timer stays: when it fires it looks whether somebody still
waits, and for how long. Refused: two waits at once, and waits outside of a task.
"""

import asyncio
from types import TracebackType
from typing import Self


class Deadline:
    """`with deadline.within(timeout_s):` raises TimeoutError as `asyncio.timeout` would.

    The task is cancelled at the limit; a cancellation by somebody else stays one.
    """

    __slots__ = ("_at_s", "_expired", "_loop", "_num_cancelled", "_task", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task | None = None  # who waits
        self._at_s = 0.0  # until when, in the loop's time
        self._num_cancelled = 0  # how often the task had been cancelled before
        self._expired = False

    def within(self, timeout_s: float) -> Self:
        """Sets the limit of the next wait, counted from now."""
        self._at_s = self._loop.time() + timeout_s
        return self

    def __enter__(self) -> None:
        task = asyncio.current_task(self._loop)
        assert task is not None, "a deadline ends a task's wait"
        assert self._task is None, "somebody waits already"
        self._num_cancelled = task.cancelling()
        self._task = task
        if self._timer is None or self._timer.when() > self._at_s:
            self._set_timer()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if self._expired:
            self._expired = False
            if task.uncancel() <= self._num_cancelled and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def stop(self) -> None:
        """Takes the timer back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.stop()
        self._timer = self._loop.call_at(self._at_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the next wait sets it again
        if self._loop.time() < self._at_s:
            self._set_timer()
        else:
            self._expired = True
            self._task.cancel()
