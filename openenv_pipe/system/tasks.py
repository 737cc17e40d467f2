"""Coroutines that run at once, and cancellations that nothing asked for."""

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from openenv_pipe.errors import FailureError, raise_first

Result = TypeVar("Result")


async def run_all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls at once and return their results, in their order.

    The first failure cancels the others and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(uncancelled(call)) for call in calls]
    except BaseExceptionGroup as errors:
        raise_first(errors)
    return [task.result() for task in tasks]


async def uncancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work of this task, and raise FailureError if it is cancelled by no one.

    A TaskGroup ignores a CancelledError of its tasks, although only `Task.cancel` may cause one.
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
    """Return what a function has returned, or what its coroutine returns."""
    if inspect.isawaitable(value):
        result: Result = await value
        return result
    return value
