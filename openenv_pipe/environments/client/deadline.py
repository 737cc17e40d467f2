"""A reusable time limit that needs one timer for many consecutive waits.

`asyncio.timeout` sets and cancels a timer for each wait, which costs more than the rest of a
message to an environment. This timer stays: when it fires, it checks whether a task still waits,
and until when. Only one wait at a time is supported, and only inside a task.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from openenv_pipe.system.progress import LONG_WAIT_S


class Deadline:
    """`with deadline.within(timeout_s):` raises TimeoutError as `asyncio.timeout` would.

    The task is cancelled at the limit. A cancellation from elsewhere stays a CancelledError.
    """

    __slots__ = (
        *("_at_s", "_expired", "_look_s", "_loop", "_num_cancelled", "_on_long_wait"),
        *("_started_s", "_task", "_timer"),
    )

    def __init__(self, on_long_wait: Callable[[float], None] | None = None) -> None:
        """on_long_wait: called with the seconds of a wait, at `LONG_WAIT_S` and its doublings."""
        self._on_long_wait = on_long_wait
        self._started_s = 0.0  # of the wait, in the loop's time
        self._look_s = 0.0  # when the timer has to look at the wait next
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None  # the task that waits now
        self._at_s = 0.0  # the limit, in the loop's time
        self._num_cancelled = 0  # cancellations that were pending before the wait
        self._expired = False

    def within(self, timeout_s: float) -> Self:
        """Set the limit of the next wait, counted from now."""
        self._started_s = self._loop.time()
        self._at_s = self._started_s + timeout_s
        self._look_s = min(self._at_s, self._started_s + LONG_WAIT_S)
        return self

    def __enter__(self) -> None:
        task = asyncio.current_task(self._loop)
        assert task is not None, "a deadline needs a task to cancel"
        assert self._task is None, "another wait is in progress"
        self._num_cancelled = task.cancelling()
        self._task = task
        if self._timer is None or self._timer.when() > self._look_s:
            self._set_timer()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if self._expired and task is not None:
            self._expired = False
            if task.uncancel() <= self._num_cancelled and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.stop()
        self._timer = self._loop.call_at(self._look_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return  # The next wait sets the timer again.
        now_s = self._loop.time()
        if now_s >= self._at_s:
            self._expired = True
            self._task.cancel()
            return
        if now_s >= self._look_s:
            waited_s = now_s - self._started_s
            if self._on_long_wait is not None:
                self._on_long_wait(waited_s)
            self._look_s = min(self._at_s, self._started_s + 2 * waited_s)
        self._set_timer()
