"""How a replica keeps its server running: deaths, restarts and lost requests, with `SmallServer`.

tests/integration/test_vllm_train.py uses a real server.
"""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import replica as replica_module
from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import BASE, CALL_LIMIT_S
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.replica import Replica
from openenv_pipe.engines.vllm.transfer import PolicyVersion, Transfer, WeightFiles
from openenv_pipe.engines.vllm.versions import Versions
from openenv_pipe.errors import EngineError
from tests.small_vllm import LIMIT_S, VALUE, VOCABULARY, SmallServer

pytestmark = pytest.mark.slow


class NoVersions(Versions):
    """There is no policy. `on_restore` is called with the client of each server that starts."""

    def __init__(self, on_restore=None) -> None:
        super().__init__(Transfer(), Owner.new("a test"), "run")
        self._on_restore = on_restore

    async def restore(self, client: VllmClient) -> None:
        if self._on_restore is not None:
            await self._on_restore(client)


def replica_of(server: SmallServer, *overrides: str, notify=print, on_restore=None) -> Replica:
    """Make a replica, not started, that has no policy to give."""
    config = compose(["conf=smoke", "engine=vllm", *overrides]).config
    return Replica(
        0,
        server,
        config.engine,
        versions=NoVersions(on_restore),
        logprob_check=None,
        probe=None,
        exclusive=False,
        vocabulary_size=VOCABULARY,
        notify=notify,
    )


@asynccontextmanager
async def running_replica(tmp_path, restore=None):
    """Run a replica, started, and its server."""
    server = SmallServer(tmp_path / "engine.log")
    restored, told = [], []

    async def note_restore(client: VllmClient) -> None:
        restored.append(client.url)

    replica = replica_of(
        server,
        "engine.max_restarts=1",
        notify=told.append,
        on_restore=restore or note_restore,
    )
    async with asyncio.timeout(LIMIT_S):
        try:
            await replica.open()
            yield replica, server, restored, told
        finally:
            await replica.close(withdraw=False)


async def ask(replica: Replica, seed: int) -> list[int]:
    """Ask as the engine does: repeat until a server has answered."""
    while True:
        client = await replica.serving()
        try:
            (sampled,) = await client.generate(BASE, [1], {"seed": seed, "max_tokens": 2})
            return sampled.token_ids
        except ServerGoneError:
            await replica._wait_after_failure(client)


async def test_a_dead_server_is_replaced_and_lost_requests_asked_again(tmp_path):
    async with running_replica(tmp_path) as (replica, server, restored, told):
        assert await ask(replica, 1) == [7, 8]
        await server.stop()
        answers = await asyncio.gather(*(ask(replica, seed) for seed in (2, 3, 4)))
        assert answers == [[7, 8]] * 3
        assert server.num_starts == 2 and len(set(restored)) == 2
        assert replica.num_restarts == 1
        assert sorted(server.seeds[-3:]) == [2, 3, 4]
        assert any("exit code 137" in text and "restart 1 of 1" in text for text in told)


async def test_when_restarts_are_used_up_all_who_wait_hear_why(tmp_path):
    """Trap 28: waiting requests end in bounded time, with the cause and the last lines of the
    log."""
    async with running_replica(tmp_path) as (replica, server, _, _):
        server.starts_dead = True
        await server.stop()
        waiting = [asyncio.create_task(ask(replica, seed)) for seed in range(3)]
        for task in waiting:
            with pytest.raises(EngineError, match="max_restarts=1 are used up") as caught:
                await task
            assert "exit code 137" in str(caught.value)
            assert "| ImportError: no such kernel" in str(caught.value)
        assert replica.client is None


async def test_a_server_that_cannot_start_says_why(tmp_path):
    server = SmallServer(tmp_path / "engine.log")
    server.starts_dead = True
    server.left_out = "it lacks DATABASE_URL"
    replica = replica_of(server)
    with pytest.raises(EngineError, match=r"before it was ready.*; it lacks DATABASE") as caught:
        await asyncio.wait_for(replica.open(), LIMIT_S)
    assert "| ImportError: no such kernel" in str(caught.value)


async def test_a_start_is_bounded(tmp_path):
    server = SmallServer(tmp_path / "engine.log")
    server.is_healthy = False
    replica = replica_of(server, "engine.start_timeout_s=0.5")
    with pytest.raises(EngineError, match=r"within engine\.start_timeout_s=0\.5"):
        await asyncio.wait_for(replica.open(), LIMIT_S)


@asynccontextmanager
async def replica_of_left_server(tmp_path, **state):
    """Make a replica, not started, of a server in the state that a dead run has left."""
    server = SmallServer(tmp_path / "engine.log")
    for name, value in state.items():
        setattr(server, name, value)
    replica = replica_of(server, "engine.start_timeout_s=60")
    async with asyncio.timeout(LIMIT_S):
        try:
            yield replica
        finally:
            await replica.close(withdraw=False)


@pytest.mark.parametrize("state", [{"is_paused": True}, {"resume_status": 404}])
async def test_a_server_that_a_killed_run_left_paused_is_woken_if_it_can_be_paused(tmp_path, state):
    """A server without vLLM's development mode has no pause, but serves adapters."""
    async with replica_of_left_server(tmp_path, **state) as replica:
        await replica.open()
        assert await ask(replica, 1) == [7, 8]


async def test_a_server_that_fails_to_wake_says_so(tmp_path):
    async with replica_of_left_server(tmp_path, resume_status=500) as replica:
        with pytest.raises(EngineError, match="/resume answered with status 500"):
            await replica.open()


async def test_a_broken_connection_to_a_live_server_costs_a_retry_only(tmp_path):
    async with running_replica(tmp_path) as (replica, server, _, _):
        server.num_drops = 2
        assert await ask(replica, 5) == [7, 8]
        assert server.num_starts == 1


async def test_a_server_that_lives_and_says_nothing_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_module, "SILENCE_LIMIT_S", 2.0)
    async with running_replica(tmp_path) as (replica, server, _, _):
        client = await replica.serving()
        server.is_healthy = False
        looking = asyncio.create_task(replica._wait_after_failure(client))
        while server.num_starts == 1:
            await asyncio.sleep(0.01)
        server.is_healthy = True
        await looking
        assert await ask(replica, 6) == [7, 8]
        assert replica.num_restarts == 1


async def test_a_watch_that_fails_still_ends_the_server(tmp_path):
    async def unwatchable() -> str:
        raise RuntimeError("no such process table")

    async with running_replica(tmp_path) as (replica, server, _, _):
        server.died = unwatchable
        while replica.client is not None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"cannot be watched: .*no such process table"):
            await replica.serving()
        assert server.is_up
    assert not server.is_up
    assert replica.client is None


async def test_a_policy_that_cannot_be_restored_ends_the_run(tmp_path):
    """A restarted server that does not pass the logprob check is not used."""
    calls = []

    async def restore(client: VllmClient) -> None:
        calls.append(client.url)
        if len(calls) > 1:
            raise EngineError("the adapter is gone")

    async with running_replica(tmp_path, restore=restore) as (replica, server, _, _):
        await server.stop()
        with pytest.raises(EngineError, match="the adapter is gone"):
            await ask(replica, 1)


async def test_a_client_whose_server_was_replaced_says_so(tmp_path):
    """This includes a client that was closed between two related calls."""
    async with running_replica(tmp_path) as (replica, server, _, _):
        old = await replica.serving()
        await server.stop()
        while await replica.serving() is old:
            await asyncio.sleep(0.01)
        for call in (
            old.metrics_text(),
            old.generate(BASE, [1], {"max_tokens": 2}),
            old.adapters(),
        ):
            with pytest.raises(ServerGoneError, match="has been replaced"):
                await call
        assert not await old.is_healthy(1.0)


def a_version(name: str) -> PolicyVersion:
    label = Owner.new("a test").label(1)
    return PolicyVersion(step=1, name=name, model=BASE, label=label, expected=np.zeros((1, 1)))


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_server_that_may_still_load_is_not_resumed_before_the_next_try(
    tmp_path, monkeypatch, is_slow
):
    """Whether the call to load fails, or has no answer in time."""
    transfer = WeightFiles(lambda folder: None, tmp_path, None)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / VALUE).write_text("0.5")
    version = a_version("first")
    async with running_replica(tmp_path) as (replica, server, _, _):
        client = await replica.serving()
        server.calls.clear()
        tell = client._tell_workers

        async def lost(method, limit_s=60.0, **arguments):
            await tell(method, 1e-6 if is_slow else limit_s, **arguments)
            raise ServerGoneError("no answer")

        with monkeypatch.context() as patched:
            patched.setattr(client, "_tell_workers", lost)
            with pytest.raises(ServerGoneError, match=r"no answer.*left paused.*restart it"):
                await transfer.send(client, version, paused=False)
        assert server.is_paused and "/resume" not in server.calls
        await transfer.send(client, version, paused=False)
        assert not server.is_paused and server.values["base"] == 0.5


async def test_the_limit_of_a_reload_grows_with_the_weights(tmp_path, monkeypatch):
    (tmp_path / "first").mkdir()
    with (tmp_path / "first" / "model.safetensors").open("wb") as file:
        file.truncate(10 * 10**9)
    async with running_replica(tmp_path) as (replica, _, _, _):
        client = await replica.serving()
        limits = []

        async def tell(method, limit_s, **arguments):
            limits.append(limit_s)

        monkeypatch.setattr(client, "_tell_workers", tell)
        transfer = WeightFiles(lambda folder: None, tmp_path, None)
        await transfer.send(client, a_version("first"), paused=False)
        assert limits == [CALL_LIMIT_S + 200.0]


async def test_a_reload_that_is_cancelled_leaves_no_server_paused(tmp_path):
    """This includes a cancellation while the server is about to pause."""
    async with running_replica(tmp_path) as (replica, server, _, _):
        client = await replica.serving()
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
