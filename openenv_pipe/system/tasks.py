"""Coroutines that run at once."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from openenv_pipe.errors import raise_first

Result = TypeVar("Result")


async def run_all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls at once and return their results, in their order.

    The first failure cancels the others and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise_first(errors)
    return [task.result() for task in tasks]
