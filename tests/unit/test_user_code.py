"""The boundary through which all user code is called: threads, limits, copies and names."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import MappingProxyType

import pytest
from fakes import made_up_episode, run_config

from openenv_pipe.errors import ConfigError, SessionError
from openenv_pipe.system.copies import copied
from openenv_pipe.system.user_code import UserCode, guarded, named
from openenv_pipe.types import Image

LIMIT_S = 60
pytestmark = pytest.mark.usefixtures("no_hang")


def code(**settings):
    return UserCode("the.key.target='module:function'", **settings)


async def test_a_function_that_blocks_leaves_the_event_loop_free():
    free, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def blocks():
        loop.call_soon_threadsafe(begun.set)
        free.wait()
        return 1

    calling = asyncio.create_task(code().call(blocks))
    await begun.wait()
    free.set()
    assert await calling == 1


async def test_calls_of_a_part_are_made_one_after_another_in_one_thread_in_their_order():
    calls = []

    def note(number):
        calls.append((number, threading.get_ident()))

    part = code()
    await asyncio.gather(*(part.call(note, number) for number in range(100)))
    assert [number for number, _ in calls] == list(range(100))
    assert len({thread for _, thread in calls}) == 1


def test_event_loops_that_call_the_same_part_get_their_own_results():
    part = code()

    async def calls(name):
        return await asyncio.gather(*(part.call(lambda *got: got, name, n) for n in range(200)))

    with ThreadPoolExecutor() as threads:
        results = list(threads.map(lambda name: asyncio.run(calls(name)), range(4)))
    assert results == [[(name, n) for n in range(200)] for name in range(4)]


async def test_coroutines_of_a_part_run_beside_each_other():
    part, waiting = code(), []

    async def meets(number):
        """Return once both calls are there."""
        waiting.append(number)
        while len(waiting) < 2:
            await asyncio.sleep(0.001)
        return number

    assert await asyncio.gather(part.call(meets, 0), part.call(meets, 1)) == [0, 1]


async def test_a_limit_is_that_of_a_call_and_not_of_those_before_it():
    """Fifty calls take longer than the limit together."""
    part, pause = code(limit_s=1.0), threading.Event()
    await asyncio.gather(*(part.call(pause.wait, 0.05) for _ in range(50)))


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_blocked_thread_is_named_with_its_line_and_left_behind(blocking):
    part, never = code(limit_s=0.2), threading.Event()

    async def blocks_its_loop():
        never.wait()

    function = never.wait if blocking else blocks_its_loop
    with pytest.raises(ConfigError, match=r"module:function' has not .* 0\.2 s, and still runs \("):
        await part.call(function)
    assert await part.call(lambda: threading.current_thread().daemon)  # another thread
    never.set()


async def test_calls_that_wait_behind_a_blocked_one_are_made_in_another_thread():
    part, never = code(limit_s=0.2), threading.Event()
    first, *others = await asyncio.gather(
        part.call(never.wait), *(part.call(int, each) for each in "123"), return_exceptions=True
    )
    assert "has not returned within" in str(first)
    assert others == [1, 2, 3]
    never.set()


async def test_a_thread_that_is_left_behind_ends_the_coroutines_that_are_awaited_in_it():
    part = code()
    blocked, free = threading.Event(), threading.Event()

    async def waits():
        while not free.is_set():
            await asyncio.sleep(0.001)
        return 1

    def blocks():
        blocked.set()
        free.wait()

    waiting = asyncio.create_task(part.call(waits))
    blocking = asyncio.create_task(part.call(blocks))
    await asyncio.to_thread(blocked.wait)
    blocking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocking
    assert await part.call(lambda: 2) == 2
    free.set()
    assert await waiting == 1


async def test_a_coroutine_that_waits_for_ever_is_cancelled_at_its_limit():
    ended = threading.Event()

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ConfigError, match="and still waits"):
        await code(limit_s=0.2).call(waits)
    assert ended.wait(LIMIT_S)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_cancellation_of_the_run_ends_the_wait_at_once(is_async):
    loop, begun, never = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def blocks():
        loop.call_soon_threadsafe(begun.set)
        never.wait()

    async def waits():
        loop.call_soon_threadsafe(begun.set)
        await asyncio.Event().wait()

    calling = asyncio.create_task(code().call(waits if is_async else blocks))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    never.set()


def test_a_thread_without_an_event_loop_can_wait_too():
    part = code(limit_s=0.2)
    assert part.call_blocking(int, "3") == 3
    never = threading.Event()
    with pytest.raises(ConfigError, match="has not returned within"):
        part.call_blocking(never.wait)
    never.set()
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(part.call_blocking, int, "4").result() == 4


async def test_errors_of_the_contract_pass_and_others_get_a_name_and_a_line():
    def raises(error):
        raise error

    with pytest.raises(SessionError, match=r"^closed$"):
        await code(passed=(SessionError,)).call(raises, SessionError("closed"))
    expected = r"module:function' raised SessionError: closed \(test_user_code\.py:\d+\)$"
    with pytest.raises(ConfigError, match=expected):
        await code().call(raises, SessionError("closed"))


def test_a_copy_shares_nothing_that_can_change():
    episode = made_up_episode(1.0)
    image = Image("ab" * 20, 3, 4, b"png")
    values = {
        "json": {"a": [1, {"b": [2.0, None]}], "c": "text"},
        "proxy": MappingProxyType({"a": [1]}),
        "episode": episode,
        "image": {"image": image},
        "tuple": ([1], {"a": []}),
        "config": run_config(),
    }
    copy = copied(values)
    assert copy == values
    assert copy["image"]["image"].png == b"png"
    shared = ids_of(copy) & ids_of(values)
    assert not shared


def ids_of(value):
    """Return the ids of all that can change in a value."""
    if isinstance(value, dict | MappingProxyType):
        return {id(value)}.union(*map(ids_of, value.values()))
    if isinstance(value, list):
        return {id(value)}.union(*map(ids_of, value))
    if isinstance(value, tuple):
        return set().union(*map(ids_of, value))
    if hasattr(value, "__dataclass_fields__"):
        fields = (getattr(value, name) for name in value.__dataclass_fields__)
        return {id(value)}.union(*map(ids_of, fields))
    if hasattr(value, "model_fields_set"):
        return {id(value)}.union(*(ids_of(each) for _, each in value))
    return set()


class Host:
    """A part that works on the run's event loop."""

    capacity = 3

    def __init__(self, error=None):
        self.error, self.lent = error, Lent(error)

    async def start(self):
        if self.error:
            raise self.error

    @asynccontextmanager
    async def session(self):
        yield self.lent


class Lent:
    def __init__(self, error):
        self.error, self.kept = error, {"text": ["a"]}

    async def step(self, action):
        if self.error:
            raise self.error
        action["seen"] = True
        return self.kept


async def test_a_guarded_part_works_with_copies():
    host, action = Host(), {}
    part = guarded(host, "host.target='m:Host'")
    assert part.capacity == 3
    await part.start()
    async with part.session() as session:
        (await session.step(action))["text"].append("forged")
    assert (action, host.lent.kept) == ({}, {"text": ["a"]})


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError(), SystemExit(0), KeyboardInterrupt(), StopIteration(), OSError()],
)
async def test_what_a_guarded_part_raises_gets_its_name(error):
    part = guarded(Host(error), "host.target='m:Host'")
    with pytest.raises(ConfigError, match=r"host\.target='m:Host' raised"):
        await part.start()
    with pytest.raises(ConfigError, match=r"host\.target='m:Host' raised"):
        async with part.session() as session:
            await session.step({})


async def test_a_guarded_part_can_cancel_no_task_of_the_run():
    """An engine that did so left the others waiting forever."""

    class Cancelling(Host):
        async def start(self):
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

    with pytest.raises(ConfigError, match="host' cancelled its own task"):
        await guarded(Cancelling(), "the host'").start()


async def test_errors_in_the_block_of_a_guarded_context_are_not_the_users():
    part = guarded(Host(), "host.target='m:Host'")
    with pytest.raises(ZeroDivisionError):
        async with part.session():
            raise ZeroDivisionError


async def test_a_cancellation_of_the_run_passes_a_guarded_part():
    async def waits():
        with named("host"):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
