"""Coroutines that run at once in a task group."""

import asyncio
import gc
import warnings

import pytest

from openenv_pipe.errors import FailureError
from openenv_pipe.system.tasks import run_all, start_in


async def waits():
    await asyncio.sleep(60)


async def cancels_itself():
    raise asyncio.CancelledError


async def test_work_that_is_cancelled_before_it_begins_leaves_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                task = start_in(group, waits())
                raise KeyError("before the first turn of the loop")
        assert task.cancelled()
        del task
        gc.collect()


async def test_a_cancellation_that_nobody_asked_for_is_a_failure():
    with pytest.raises(FailureError, match="nothing cancelled it"):
        await run_all([cancels_itself()])
