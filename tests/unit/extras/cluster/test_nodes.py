"""Processes that Ray places on nodes, and the connection by which it does."""

import asyncio
import threading
import types

import pytest

from openenv_pipe.errors import HostError
from openenv_pipe.extras.cluster import nodes as module
from openenv_pipe.extras.cluster.nodes import PlacedProcess, connected

LIMIT_S = 30.0


async def test_a_connection_whose_task_is_cancelled_is_closed(monkeypatch):
    is_waiting, may_go_on, is_closed = threading.Event(), threading.Event(), threading.Event()

    class SlowNodes:
        def __init__(self, address):
            is_waiting.set()
            assert may_go_on.wait(LIMIT_S)

        def close(self):
            is_closed.set()

    monkeypatch.setattr(module, "Nodes", SlowNodes)
    task = asyncio.create_task(connected("auto"))
    assert await asyncio.to_thread(is_waiting.wait, LIMIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_go_on.set()
    assert await asyncio.to_thread(is_closed.wait, LIMIT_S)


def test_a_process_that_cannot_be_made_on_any_node_is_no_lost_one():
    process = PlacedProcess.__new__(PlacedProcess)
    process.name = "rollout worker 0"
    error = types.SimpleNamespace(actor_init_failed=True)
    words = process._as_pipe_error(error)
    assert isinstance(words, HostError)
    assert not isinstance(words, module.WorkerLostError)
    assert "rollout worker 0 cannot be made" in str(words)
