"""The supervisor of a vLLM server: deaths, restarts and lost requests, with `SmallServer`.

tests/integration/test_vllm_train.py uses a real server.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import supervisor as supervisor_module
from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.supervisor import VllmSupervisor
from openenv_pipe.errors import EngineError
from tests.small_vllm import SmallServer

LIMIT_S = 120.0  # of every test, so that none waits for ever


@asynccontextmanager
async def running_supervisor(tmp_path, *overrides: str, restore=None):
    """Run a supervisor, started, and its server."""
    config = compose(["conf=smoke", "engine=vllm", "engine.max_restarts=1", *overrides]).config
    server = SmallServer(tmp_path / "engine.log")
    restored, told = [], []

    async def note_restore(client: VllmClient) -> None:
        restored.append(client.url)

    supervisor = VllmSupervisor(
        server, config.engine, restore=restore or note_restore, tell=told.append
    )
    async with asyncio.timeout(LIMIT_S):
        try:
            await supervisor.start()
            yield supervisor, server, restored, told
        finally:
            await supervisor.close()


async def ask(supervisor: VllmSupervisor, seed: int) -> list[int]:
    """Ask as the engine does: repeat until a server has answered."""
    while True:
        client = await supervisor.serving()
        try:
            (sampled,) = await client.generate(BASE, [1], {"seed": seed, "max_tokens": 2})
            return sampled.token_ids
        except ServerGoneError:
            await supervisor.wait_after_failure(client)


async def test_a_dead_server_is_replaced_and_lost_requests_asked_again(tmp_path):
    async with running_supervisor(tmp_path) as (supervisor, server, restored, told):
        assert await ask(supervisor, 1) == [7, 8]
        await server.stop()
        answers = await asyncio.gather(*(ask(supervisor, seed) for seed in (2, 3, 4)))
        assert answers == [[7, 8]] * 3
        assert server.num_starts == 2 and len(set(restored)) == 2
        assert supervisor.num_restarts == 1
        assert sorted(server.seeds[-3:]) == [2, 3, 4]
        assert any("exit code 137" in text and "restart 1 of 1" in text for text in told)


async def test_when_restarts_are_used_up_all_who_wait_hear_why(tmp_path):
    """Trap 28: waiting requests end in bounded time, with the cause and the last lines of the
    log."""
    async with running_supervisor(tmp_path) as (supervisor, server, _, _):
        server.starts_dead = True
        await server.stop()
        waiting = [asyncio.create_task(ask(supervisor, seed)) for seed in range(3)]
        for task in waiting:
            with pytest.raises(EngineError, match="max_restarts=1 are used up") as caught:
                await task
            assert "exit code 137" in str(caught.value)
            assert "| ImportError: no such kernel" in str(caught.value)
        assert supervisor.client is None


async def test_a_server_that_cannot_start_says_why(tmp_path):
    server = SmallServer(tmp_path / "engine.log")
    server.starts_dead = True
    server.left_out = "it lacks DATABASE_URL"
    config = compose(["conf=smoke", "engine=vllm"]).config
    supervisor = VllmSupervisor(server, config.engine, restore=None, tell=print)
    with pytest.raises(EngineError, match=r"before it was ready.*; it lacks DATABASE") as caught:
        await asyncio.wait_for(supervisor.start(), LIMIT_S)
    assert "| ImportError: no such kernel" in str(caught.value)


async def test_a_start_is_bounded(tmp_path):
    server = SmallServer(tmp_path / "engine.log")
    server.is_healthy = False
    config = compose(["conf=smoke", "engine=vllm", "engine.start_timeout_s=0.5"]).config
    supervisor = VllmSupervisor(server, config.engine, restore=None, tell=print)
    with pytest.raises(EngineError, match=r"within engine\.start_timeout_s=0\.5"):
        await asyncio.wait_for(supervisor.start(), LIMIT_S)


@asynccontextmanager
async def supervisor_of_left_server(tmp_path, **state):
    """Make a supervisor, not started, for a server in the state that a dead run has left."""
    server = SmallServer(tmp_path / "engine.log")
    for name, value in state.items():
        setattr(server, name, value)
    config = compose(["conf=smoke", "engine=vllm", "engine.start_timeout_s=60"]).config
    supervisor = VllmSupervisor(server, config.engine, restore=_nothing, tell=print)
    async with asyncio.timeout(LIMIT_S):
        try:
            yield supervisor
        finally:
            await supervisor.close()


async def _nothing(_: VllmClient) -> None:
    """Restore nothing: there is no policy."""


async def test_a_server_that_a_killed_run_left_paused_is_woken(tmp_path):
    async with supervisor_of_left_server(tmp_path, is_paused=True) as supervisor:
        await supervisor.start()
        assert await ask(supervisor, 1) == [7, 8]


async def test_a_server_that_cannot_be_paused_need_not_be_woken(tmp_path):
    """A server without vLLM's development mode has no pause, but serves adapters."""
    async with supervisor_of_left_server(tmp_path, resume_status=404) as supervisor:
        await supervisor.start()
        assert await ask(supervisor, 1) == [7, 8]


async def test_a_server_that_fails_to_wake_says_so(tmp_path):
    async with supervisor_of_left_server(tmp_path, resume_status=500) as supervisor:
        with pytest.raises(EngineError, match="/resume answered with status 500"):
            await supervisor.start()


async def test_a_broken_connection_to_a_live_server_costs_a_retry_only(tmp_path):
    async with running_supervisor(tmp_path) as (supervisor, server, _, _):
        server.num_drops = 2
        assert await ask(supervisor, 5) == [7, 8]
        assert server.num_starts == 1


async def test_a_server_that_lives_and_says_nothing_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "SILENCE_LIMIT_S", 2.0)
    async with running_supervisor(tmp_path) as (supervisor, server, _, _):
        client = await supervisor.serving()
        server.is_healthy = False
        looking = asyncio.create_task(supervisor.wait_after_failure(client))
        while server.num_starts == 1:
            await asyncio.sleep(0.01)
        server.is_healthy = True
        await looking
        assert await ask(supervisor, 6) == [7, 8]
        assert supervisor.num_restarts == 1


async def test_a_watch_that_fails_still_ends_the_server(tmp_path):
    async def unwatchable() -> str:
        raise RuntimeError("no such process table")

    async with running_supervisor(tmp_path) as (supervisor, server, _, _):
        server.died = unwatchable
        while supervisor.client is not None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"cannot be watched: .*no such process table"):
            await supervisor.serving()
        assert server.is_up
    assert not server.is_up
    assert supervisor.client is None


async def test_a_policy_that_cannot_be_restored_ends_the_run(tmp_path):
    """A restarted server that does not pass the logprob check is not used."""
    calls = []

    async def restore(client: VllmClient) -> None:
        calls.append(client.url)
        if len(calls) > 1:
            raise EngineError("the adapter is gone")

    async with running_supervisor(tmp_path, restore=restore) as (supervisor, server, _, _):
        await server.stop()
        with pytest.raises(EngineError, match="the adapter is gone"):
            await ask(supervisor, 1)


async def test_a_client_whose_server_was_replaced_says_so(tmp_path):
    """This includes a client that was closed between two related calls."""
    async with running_supervisor(tmp_path) as (supervisor, server, _, _):
        old = await supervisor.serving()
        await server.stop()
        while await supervisor.serving() is old:
            await asyncio.sleep(0.01)
        for call in (
            old.metrics_text(),
            old.generate(BASE, [1], {"max_tokens": 2}),
            old.adapters(),
        ):
            with pytest.raises(ServerGoneError, match="has been replaced"):
                await call
        assert not await old.is_healthy(1.0)


async def test_a_reload_that_is_cancelled_leaves_no_server_paused(tmp_path):
    """This includes a cancellation while the server is about to pause."""
    async with running_supervisor(tmp_path) as (supervisor, server, _, _):
        client = await supervisor.serving()
        server.calls.clear()
        server.may_load.clear()

        async def reload() -> None:
            async with client.replacing_weights():
                await client.load_weights(tmp_path, "1")

        reloading = asyncio.create_task(reload())
        while not server.calls:
            await asyncio.sleep(0.01)
        reloading.cancel()
        await asyncio.sleep(0.05)
        server.may_load.set()
        with pytest.raises(asyncio.CancelledError):
            await reloading
        assert server.calls == ["/pause", "paused", "/resume"]
        assert not server.is_paused
