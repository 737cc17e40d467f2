"""A reusable time limit that needs one timer for many consecutive waits.

`asyncio.timeout` sets and cancels a timer for each wait, which costs more than the rest of a
message to an environment. This timer stays: when it fires, it checks whether a task still waits,
and until when. Only one wait at a time is supported, and only inside a task.
"""

import asyncio
from types import TracebackType
from typing import Self


class Deadline:
    """`with deadline.within(timeout_s):` raises TimeoutError as `asyncio.timeout` would.

    The task is cancelled at the limit. A cancellation from elsewhere stays a CancelledError.
    """

    __slots__ = ("_at_s", "_expired", "_loop", "_num_cancelled", "_task", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None  # the task that waits now
        self._at_s = 0.0  # the limit, in the loop's time
        self._num_cancelled = 0  # cancellations that were pending before the wait
        self._expired = False

    def within(self, timeout_s: float) -> Self:
        """Set the limit of the next wait, counted from now."""
        self._at_s = self._loop.time() + timeout_s
        return self

    def __enter__(self) -> None:
        task = asyncio.current_task(self._loop)
        assert task is not None, "a deadline needs a task to cancel"
        assert self._task is None, "another wait is in progress"
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
        if self._expired and task is not None:
            self._expired = False
            if task.uncancel() <= self._num_cancelled and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.stop()
        self._timer = self._loop.call_at(self._at_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return  # The next wait sets the timer again.
        if self._loop.time() < self._at_s:
            self._set_timer()
        else:
            self._expired = True
            self._task.cancel()
