"""Calls of user code: functions and objects that are not this package's own.

Every such call goes through this module. It copies what goes in and out, so that user code changes
nothing that the run stores or trains on. It holds a time limit, and it turns whatever the code
raises, `SystemExit` and `CancelledError` included, into an error that names the code.

`UserCode` runs the functions of one part (a reward term, an adapter) in a thread with an event
loop of its own: no function blocks the run's event loop, and calls of one part never overlap where
they would not on one event loop. `guarded` is for objects that have to work on the run's own
event loop, such as engines.
"""

import asyncio
import inspect
import logging
import selectors
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.system.copies import copied
from openenv_pipe.system.end_at_once import end_at_once

LIMIT_S = 600.0  # of a call, where its part has no limit of its own
CANCEL_LIMIT_S = 2.0  # how long a cancelled coroutine may take for its clean-up
NEVER_PASSED = (StopIteration, StopAsyncIteration)  # no coroutine can raise them

Part = TypeVar("Part")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    """One call of a function, which a `_Worker` makes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    returned: Any = None
    raised: BaseException | None = None
    began_s: float | None = None  # None: calls before it still run
    is_awaiting: bool = False  # the function has returned an awaitable
    worker: "_Worker | None" = None  # the one that makes the call
    task: "asyncio.Task[Any] | None" = None
    ended: "Future[None]" = field(default_factory=Future)

    def left_s(self, limit_s: float) -> float:
        """Return how much of the limit is left; all of it before the call has begun."""
        return limit_s if self.began_s is None else self.began_s + limit_s - time.monotonic()

    async def run(self) -> None:
        self.began_s = time.monotonic()
        try:
            returned = self.function(*self.arguments, **self.keywords)
            if inspect.isawaitable(returned):
                self.is_awaiting = True
                returned = await returned
            self.returned = copied(returned)
        except BaseException as error:
            self.raised = error
        with suppress(Exception):  # nobody waits any more
            self.ended.set_result(None)


class _Worker:
    """A daemon thread with an event loop, which makes calls in the order of their queue."""

    def __init__(self, name: str, calls: deque[_Call]) -> None:
        self._calls = calls
        self._is_abandoned = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def begin_next(self) -> None:
        """Begin the next call of the queue. May be called from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._make_next()))

    async def _make_next(self) -> None:
        """Make the next call. It leaves the queue only now, when nothing blocks this thread."""
        if not self._is_abandoned and self._calls:
            call = self._calls.popleft()
            call.worker, call.task = self, asyncio.current_task()
            await call.run()

    def cancel(self, call: _Call) -> None:
        if call.task is not None:
            self._loop.call_soon_threadsafe(call.task.cancel)

    def end(self) -> None:
        """Begin no further call, and end the thread once it is free."""
        self._is_abandoned = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.stop)

    def where(self) -> str:
        """Return the line that the thread runs, "file.py:12"; empty if it waits for an event."""
        return _line_of(self._thread.ident)


class UserCode:
    """Calls the functions of one part of a run that a user provides."""

    def __init__(
        self, name: str, *, limit_s: float = LIMIT_S, passed: tuple[type[Exception], ...] = ()
    ) -> None:
        """
        Args:
            name: the key and the target, for messages.
            limit_s: of one call.
            passed: the exceptions that the part's contract lets its functions raise.
        """
        self.name = name
        self._limit_s = limit_s
        self._passed = passed
        self._calls: deque[_Call] = deque()
        self._worker: _Worker | None = None

    async def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a function with copies of the arguments, await its result, and return a copy of it.

        Raises:
            ConfigError: it raised something that is not `passed`, or has not returned in time.
        """
        call = self._begin(function, arguments, keywords)
        ended = asyncio.wrap_future(call.ended)
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=max(0.0, call.left_s(self._limit_s)))
                if not ended.done() and call.left_s(self._limit_s) <= 0:
                    self._report_late(call)
            return self._result(call)
        finally:
            if not ended.done():
                await self._stop(call, ended)

    def call_blocking(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Do the same as `call`, while this thread waits."""
        call = self._begin(function, arguments, keywords)
        try:
            while not call.ended.done():
                with suppress(TimeoutError):
                    call.ended.result(max(0.0, call.left_s(self._limit_s)))
                if not call.ended.done() and call.left_s(self._limit_s) <= 0:
                    self._report_late(call)
            return self._result(call)
        finally:
            if not call.ended.done():
                self._abandon(call)

    def _begin(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> _Call:
        call = _Call(function, copied(arguments), copied(keywords))
        self._calls.append(call)
        if self._worker is None:
            self._worker = self._new_worker()
        self._worker.begin_next()
        return call

    def _new_worker(self) -> _Worker:
        worker = _Worker(self.name, self._calls)
        weakref.finalize(self, worker.end)
        return worker

    async def _stop(self, call: _Call, ended: "asyncio.Future[None]") -> None:
        """Cancel a call that nobody waits for any more, and leave a blocked thread behind."""
        if call.began_s is None:
            call.function = _nothing
        elif call.worker is not None:
            call.worker.cancel(call)
            if call.is_awaiting:
                await asyncio.wait({ended}, timeout=CANCEL_LIMIT_S)
            if not ended.done():
                self._abandon(call)
        ended.cancel()

    def _abandon(self, call: _Call) -> None:
        """Leave a thread behind that a call blocks; another one makes the calls that follow."""
        if call.worker is None or call.worker is not self._worker:
            return
        call.worker.end()
        self._worker = self._new_worker() if self._calls else None
        for _ in range(len(self._calls)):
            assert self._worker is not None
            self._worker.begin_next()

    def _result(self, call: _Call) -> Any:
        if call.raised is None:
            return call.returned
        raise_named(self.name, call.raised, self._passed)

    def _report_late(self, call: _Call) -> NoReturn:
        assert call.worker is not None
        raise _late(self.name, self._limit_s, call.worker.where())


class UserCodeError(ConfigError):
    """User code has not returned in time, or raised something that its contract does not allow."""


class _GuardedPart:
    """An object of a user that works on the run's event loop, such as an engine or a host.

    Its methods get and return copies of data. What they raise beyond `passed` becomes a ConfigError
    that names the part.
    """

    def __init__(self, part: Any, name: str, passed: tuple[type[Exception], ...]) -> None:
        self._part = part
        self._name = name
        self._passed = passed

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._part, attribute)
        if not inspect.isroutine(value):
            return value

        def call(*arguments: Any, **keywords: Any) -> Any:
            with named(self._name, self._passed):
                return self._guard(value(*copied(arguments), **copied(keywords)))

        return call

    async def __aenter__(self) -> Any:
        return await self._finish(self._part.__aenter__())

    async def __aexit__(self, *error: Any) -> bool | None:
        left = await _GuardedContext(self._part, self._guard_lent, self._finish).__aexit__(*error)
        return left

    def _guard(self, returned: Any) -> Any:
        if inspect.isawaitable(returned):
            return self._finish_apart(returned)
        if isinstance(returned, AbstractAsyncContextManager):
            return _GuardedContext(returned, self._guard_lent, self._finish)
        return copied(returned)

    async def _finish(self, work: Awaitable[Any]) -> Any:
        with named(self._name, self._passed):
            return copied(await work)

    async def _finish_apart(self, work: Awaitable[Any]) -> Any:
        """Await the work in a task of its own, so that it can cancel no task of the run."""
        task = asyncio.create_task(self._finish(work))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if task.cancelled():
            raise UserCodeError(
                f"{self._name} cancelled its own task, although nothing asked it to"
            )
        return task.result()

    def _guard_lent(self, lent: Any) -> Any:
        """Guard an object of the user's own that a context manager lends, such as a session."""
        return lent if is_ours(lent) else _GuardedPart(lent, self._name, self._passed)


def guarded(part: Part, name: str, passed: tuple[type[Exception], ...] = (PipeError,)) -> Part:
    """Return a user's object whose methods are called as user code on the run's event loop.

    passed: the exceptions that the part's contract lets it raise.
    """
    return cast(Part, _GuardedPart(part, name, passed))


@dataclass(frozen=True, slots=True)
class _GuardedContext(AbstractAsyncContextManager[Any]):
    """An asynchronous context manager of a user. Errors of the block in it are not the user's."""

    context: AbstractAsyncContextManager[Any]
    guard: Callable[[Any], Any]
    finish: Callable[[Awaitable[Any]], Awaitable[Any]]

    async def __aenter__(self) -> Any:
        return self.guard(await self.finish(self.context.__aenter__()))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        async def leave() -> bool | None:
            try:
                return await self.context.__aexit__(kind, error, trace)
            except BaseException as raised:
                if raised is error:
                    return False
                raise

        left: bool | None = await self.finish(leave())
        return left


def is_ours(part: object) -> bool:
    """Return whether an object's class is one of this package."""
    return type(part).__module__.startswith("openenv_pipe.")


@contextmanager
def named(name: str, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what user code raises in this block into a UserCodeError that names the code.

    A cancellation of the current task passes, and so does Ctrl-C where no event loop runs.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    num_cancels = task.cancelling() if task else 0
    try:
        yield
    except KeyboardInterrupt as error:
        if task is None:
            raise
        raise_named(name, error, passed)
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling() > num_cancels:
            raise
        raise_named(name, error, passed)
    except BaseException as error:
        raise_named(name, error, passed)


@contextmanager
def ending_when_late(name: str, limit_s: float = LIMIT_S) -> Iterator[None]:
    """End the whole process if this block takes longer than the limit, with an error that says why.

    It is for code that has to run in its caller's thread, which cannot be freed otherwise.
    """
    thread = threading.get_ident()
    is_over = threading.Event()

    def watch() -> None:
        if not is_over.wait(limit_s):
            end_at_once(_late(name, limit_s, _line_of(thread)))

    threading.Thread(target=watch, name=f"limit of {name}", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def raise_named(name: str, error: BaseException, passed: tuple[type[Exception], ...]) -> NoReturn:
    """Raise the error if it may pass, else a UserCodeError that names the code and the line."""
    if isinstance(error, (*passed, UserCodeError)) and not isinstance(error, NEVER_PASSED):
        raise error
    _log.info("%s raised", name, exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({_at(frames[-1].filename, frames[-1].lineno)})" if frames else ""
    is_cancel = isinstance(error, asyncio.CancelledError)
    text = f": {error}" if str(error) else ""
    what = ", although nothing cancelled it" if is_cancel else text
    raise UserCodeError(f"{name} raised {type(error).__name__}{what}{where}") from error


def _late(name: str, limit_s: float, where: str) -> UserCodeError:
    still = f"runs ({where})" if where else "waits"
    return UserCodeError(f"{name} has not returned within {limit_s:g} s, and still {still}")


def _line_of(thread: int | None) -> str:
    """Return the line that a thread runs, "file.py:12"; empty if it waits for an event."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None or frame.f_code.co_filename == selectors.__file__:
        return ""
    return _at(frame.f_code.co_filename, frame.f_lineno)


def _at(file: str, line: int | None) -> str:
    return f"{Path(file).name}:{line}"


def _nothing(*_: Any, **__: Any) -> None:
    """What is called in the place of a function that is not needed any more."""
