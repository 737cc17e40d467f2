"""Clients that find no episode: what the server logs, and what they are told."""

import asyncio

import httpx
import pytest
from clients import RUN, training_server
from test_clients import ALLOWED, report

from openenv_pipe import client as client_module
from openenv_pipe.client import ClientError
from openenv_pipe.extras.agents.clients import rollout_queue


async def test_groups_that_nobody_plays_to_the_end_are_named(monkeypatch):
    """In the log of the server, and to every client that finds no episode."""
    monkeypatch.setattr(rollout_queue, "STALL_S", 0.01)
    logged: asyncio.Queue[str] = asyncio.Queue()
    async with (
        training_server(notify=logged.put_nowait) as server,
        server.client() as client,
        httpx.AsyncClient(base_url=server.url, headers=ALLOWED) as http,
    ):
        early = await http.post("/rollouts", json={})
        assert "has not begun to play" in early.json()["error"]["message"]
        assert logged.empty()
        collecting = server.collect(group_size=3)
        await report(client, 0.0, {"board": 7})
        assert await logged.get() == f"waiting for clients at {server.url}"
        line, said = await logged.get(), ' {"board": 7} (ends in '
        assert "clients have begun: 2 more of the task client/" in line
        assert said in line
        answer = await http.post("/rollouts", json={"task": {"board": 8}})
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (429, True)
        for reward in (0.0, 1.0):
            await report(client, reward, {"board": 7})
        await collecting


async def test_a_client_that_waits_says_why_once(monkeypatch, caplog):
    for name in ("WARN_S", "ASK_S", "RETRY_S"):
        monkeypatch.setattr(client_module, name, 0.001)

    def warnings():
        return [each.message for each in caplog.records if each.name == "openenv_pipe.client"]

    async with training_server() as server, server.client() as client:
        waiting = [asyncio.create_task(report(client, 1.0)) for _ in range(2)]
        while not warnings():
            await asyncio.sleep(0.001)
        await server.collect()
        await asyncio.gather(*waiting)
    (waited,) = warnings()
    assert "answered 429: no episode waits for a client yet" in waited
    async with server.client() as client:
        with pytest.raises(ClientError, match="no server answers at"):
            async with client.rollout(timeout_s=1.0):
                pass
    assert "no server answers at" in warnings()[1]


async def test_a_client_of_an_earlier_run_plays_nothing_for_another_one():
    async with training_server() as server, server.client() as client:
        collecting = server.collect()
        await report(client, 0.0)
        server.context.agents.queue.run = "echo/0002"
        with pytest.raises(ClientError, match=f"409: .*echo/0002.*{RUN}"):
            await report(client, 1.0)
        async with server.client() as another:
            await report(another, 1.0)
        (group,) = await collecting
    assert [episode.reward for episode in group.episodes] == [0.0, 1.0]
