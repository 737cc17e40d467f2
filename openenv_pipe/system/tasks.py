"""Concurrent coroutines, work in other threads, and cancellations that nobody asked for."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from openenv_pipe.errors import FailureError, raise_first
from openenv_pipe.system.out_of_memory import as_out_of_memory

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


async def run_all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls concurrently and return their results, in the order of the calls.

    The first failure cancels the others and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [start_in(group, call) for call in calls]
    except BaseExceptionGroup as errors:
        raise_first(errors)
    return [task.result() for task in tasks]


def in_thread(
    executor: Executor, function: Callable[[*Arguments], Result], *arguments: *Arguments
) -> asyncio.Future[Result]:
    """Start the function in a thread of the executor, such as torch's.

    It is queued at once, in the order of the calls. What it raises is the future's error; if memory
    ran out, that is an OutOfMemoryError with advice for the stage.
    """

    def advised(*arguments: *Arguments) -> Result:
        try:
            return function(*arguments)
        except Exception as error:
            readable = as_out_of_memory(error)
            if readable is None or readable is error:
                raise
            raise readable from error

    return asyncio.get_running_loop().run_in_executor(executor, advised, *arguments)


def start_in(group: asyncio.TaskGroup, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start work in a group. A cancellation that nobody requested raises FailureError."""
    task = group.create_task(_uncancelled(work))
    # Python warns about a coroutine that nobody awaits, such as one cancelled before it begins.
    task.add_done_callback(lambda _: work.close())
    return task


async def _uncancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work of this task.

    A TaskGroup ignores a CancelledError of its tasks, even one that no `Task.cancel` caused.
    """
    task = asyncio.current_task()
    assert task is not None
    try:
        return await work
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise FailureError(
            "a part of the run raised CancelledError, although nothing cancelled it; "
            "`openenv-pipe -v` shows where"
        ) from error


async def awaited(value: Result | Awaitable[Result]) -> Result:
    """Return a value, or the result of awaiting it if it is awaitable."""
    if inspect.isawaitable(value):
        result: Result = await value
        return result
    return value
