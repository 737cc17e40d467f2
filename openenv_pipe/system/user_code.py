"""Calls of user code: functions and objects that are not this package's own.

Every such call goes through this module. It copies what goes in and out, so that user code changes
nothing that the run stores or trains on. `UserCode` also enforces a time limit. Whatever the code
raises, `SystemExit` and `CancelledError` included, becomes an error that names the code.

`UserCode` runs the functions of one part (a reward term, an adapter) in a thread with an event
loop of its own: no function blocks the run's event loop, and calls of one part never overlap where
they would not on one event loop. `guarded` is for objects that have to work on the run's own
event loop, such as engines.
"""

import asyncio
import inspect
import logging
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.system.call_thread import Call, CallThread, EndedCalls, at, line_of
from openenv_pipe.system.copies import copied
from openenv_pipe.system.stop_request import end_at_once

LIMIT_S = 600.0  # of a call, where its part has no limit of its own
CANCEL_LIMIT_S = 2.0  # how long a cancelled coroutine may take for its clean-up
NEVER_PASSED = (StopIteration, StopAsyncIteration)  # no coroutine can raise them

Part = TypeVar("Part")

_log = logging.getLogger(__name__)


class UserCode:
    """Calls the functions of one part of a run that a user provides."""

    def __init__(
        self, name: str, *, limit_s: float = LIMIT_S, passed: tuple[type[Exception], ...] = ()
    ) -> None:
        """name: the key and the target, for messages. limit_s: of one call.

        passed: the exceptions that the part's contract lets its functions raise.
        """
        self.name = name
        self._limit_s = limit_s
        self._passed = passed
        self._calls: deque[Call] = deque()
        self._thread: CallThread | None = None
        self._ended: EndedCalls | None = None  # of the event loop that called last

    async def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a function with copies of the arguments, await its result, and return a copy of it.

        Raises ConfigError: it raised something that is not `passed`, or has not returned in time.
        """
        loop = asyncio.get_running_loop()
        if self._ended is None or self._ended.loop is not loop:
            self._ended = EndedCalls(loop)
        call = self._begin(function, arguments, keywords, self._ended.add)
        try:
            while not call.is_over:
                await call.wait(max(0.0, call.left_s(self._limit_s)))
                self._check_limit(call)
            return self._result(call)
        finally:
            if not call.is_over:
                await self._stop(call)

    def call_blocking(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Do the same as `call`, and block this thread until the function returns."""
        ended = threading.Event()
        call = self._begin(function, arguments, keywords, lambda _: ended.set())
        try:
            while not call.is_over:
                ended.wait(max(0.0, call.left_s(self._limit_s)))
                self._check_limit(call)
            return self._result(call)
        finally:
            if not call.is_over:
                self._abandon(call)

    def _begin(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        notify: Callable[[Call], None],
    ) -> Call:
        call = Call(function, copied(arguments), copied(keywords), notify)
        self._calls.append(call)
        if self._thread is None:
            self._thread = self._new_thread()
        self._thread.begin()
        return call

    def _new_thread(self) -> CallThread:
        thread = CallThread(self.name, self._calls)
        weakref.finalize(self, thread.end)
        return thread

    async def _stop(self, call: Call) -> None:
        """Cancel a call that nobody waits for any more; if it blocks its thread, abandon that."""
        if call.began_s is None:
            call.function = _nothing
        elif call.thread is not None:
            call.thread.cancel(call)
            if call.task is not None:
                await call.wait(CANCEL_LIMIT_S)
            if not call.is_over:
                self._abandon(call)

    def _abandon(self, call: Call) -> None:
        """Abandon a thread that a call blocks; another one makes the calls that follow."""
        if call.thread is None or call.thread is not self._thread:
            return
        call.thread.end()
        self._thread = self._new_thread() if self._calls else None
        if self._thread is not None:
            self._thread.begin()

    def _result(self, call: Call) -> Any:
        if call.raised is None:
            return call.returned
        raise_named(self.name, call.raised, self._passed)

    def _check_limit(self, call: Call) -> None:
        if not call.is_over and call.left_s(self._limit_s) <= 0:
            assert call.thread is not None
            raise _late(self.name, self._limit_s, call.thread.where())


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
    """A user's asynchronous context manager. What is raised within its block is not the user's."""

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
            end_at_once(_late(name, limit_s, line_of(thread)))

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
    where = f" ({at(frames[-1].filename, frames[-1].lineno)})" if frames else ""
    is_cancel = isinstance(error, asyncio.CancelledError)
    text = f": {error}" if str(error) else ""
    what = ", although nothing cancelled it" if is_cancel else text
    raise UserCodeError(f"{name} raised {type(error).__name__}{what}{where}") from error


def _late(name: str, limit_s: float, where: str) -> UserCodeError:
    still = f"runs ({where})" if where else "waits"
    return UserCodeError(f"{name} has not returned within {limit_s:g} s, and still {still}")


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a function whose call is not needed any more."""
