"""`Deadline` ends waits as `asyncio.timeout` does, with one timer for all of them."""

import asyncio

import pytest

from openenv_pipe.environments.client.deadline import Deadline

pytestmark = pytest.mark.usefixtures("virtual_time")


async def wait(deadline, timeout_s, for_s=5.0):
    with deadline.within(timeout_s):
        await asyncio.sleep(for_s)


async def test_a_wait_ends_at_its_limit_and_the_task_goes_on():
    deadline = Deadline()
    with pytest.raises(TimeoutError):
        await wait(deadline, 0.01)
    assert asyncio.current_task().cancelling() == 0
    await wait(deadline, 5, for_s=0.01)
    deadline.stop()


@pytest.mark.parametrize(("first_s", "second_s"), [(5, 0.01), (0.02, 0.04)])
async def test_the_timer_of_an_earlier_wait_serves_a_later_one(first_s, second_s):
    """The earlier wait had a longer, or a shorter, limit."""
    deadline = Deadline()
    loop = asyncio.get_running_loop()
    await wait(deadline, first_s, for_s=0)
    started_s = loop.time()
    with pytest.raises(TimeoutError):
        await wait(deadline, second_s, for_s=0.5)
    assert loop.time() - started_s >= second_s - 1e-9  # sums of clock times are rounded


async def test_a_timer_that_fires_between_waits_is_set_again():
    deadline, errors = Deadline(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, error: errors.append(error))
    await wait(deadline, 0.01, for_s=0)
    await asyncio.sleep(0.03)
    with pytest.raises(TimeoutError):
        await wait(deadline, 0.01)
    assert errors == []


async def test_a_hundred_waits_set_one_timer(monkeypatch):
    loop = asyncio.get_running_loop()
    deadline, timers, call_at = Deadline(), [], loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *given: timers.append(given) or call_at(*given))
    for _ in range(100):
        with deadline.within(5):
            pass
    assert len(timers) == 1
    deadline.stop()


async def test_a_cancellation_by_somebody_else_stays_one():
    deadline = Deadline()
    task = asyncio.create_task(wait(deadline, 0.02))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.04)  # the timer fires when no wait is active
    assert asyncio.current_task().cancelling() == 0


async def test_a_cancellation_at_the_limit_is_not_lost():
    deadline = Deadline()
    task = asyncio.create_task(wait(deadline, 0.01))

    def both():
        deadline._look()
        task.cancel()

    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.02, both)
    deadline._timer.cancel()  # `both` calls `_look` in the timer's place
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_other_errors_pass():
    deadline = Deadline()
    with pytest.raises(KeyError), deadline.within(5):
        raise KeyError("a")
    deadline.stop()


async def test_a_long_wait_is_told_with_its_seconds():
    waits = []
    deadline = Deadline(lambda waited_s: waits.append(round(waited_s)))
    await wait(deadline, 5, for_s=1)
    await wait(deadline, 100, for_s=19)
    assert waits == []
    with pytest.raises(TimeoutError):
        await wait(deadline, 100, for_s=200)
    assert waits == [20, 40, 80]
    deadline.stop()
