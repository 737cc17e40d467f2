"""Ask work on an event loop to save and end, from another thread or a signal; or end it at once."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from openenv_pipe.errors import FailureError, PipeError
from openenv_pipe.system.untrusted_text import for_people

Result = TypeVar("Result")


class StopRequest:
    """Runs work on an event loop and cancels it once somebody asks it to stop."""

    def __init__(self) -> None:
        self.is_made = False
        self.is_repeated = False  # what is not saved yet is given up
        self.farewell = ""  # shown to a user whose second request ends the work at once
        self._cancel: Callable[[], object] | None = None

    def make(self) -> None:
        """Cancel the work, or the next work if none has started. May be called from any thread.

        A second call also cancels the work's clean-up, such as saving.
        """
        self.is_made, self.is_repeated = True, self.is_made
        cancel = self._cancel  # read once, because the loop's thread may take it away
        if cancel is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                cancel()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end on a new event loop in this thread.

        Raises KeyboardInterrupt if a request ended it, and FailureError if something else, such as
        `sys.exit` in user code, ended it without an exception of its own.
        """
        try:
            return asyncio.run(self._run(work))
        except (asyncio.CancelledError, SystemExit, GeneratorExit) as error:
            if self.is_made and isinstance(error, asyncio.CancelledError):
                raise KeyboardInterrupt from None
            raise FailureError(
                f"{type(error).__name__}({error}) ended the run, although nothing stopped it; "
                "`openenv-pipe -v` shows where it was raised"
            ) from error

    async def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with self.accepting(lambda: loop.call_soon_threadsafe(task.cancel)):
            return await work

    @contextlib.contextmanager
    def accepting(self, cancel: Callable[[], object]) -> Iterator[None]:
        """While open, a request calls `cancel`. Entered on the event loop's thread."""
        self._cancel = cancel
        if self.is_made:
            cancel()
        try:
            yield
        finally:
            self._cancel = None


def end_at_once(error: PipeError) -> None:
    """Print the error and exit the whole process, from any thread. The run can be resumed.

    For cases in which nothing else ends it with this error, such as a blocked thread.
    """
    print(f"error: {for_people(str(error))}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
