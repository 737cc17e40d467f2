"""Clients in the place of the pipeline's loop: real HTTP to a server with a scripted engine."""

import asyncio
import json
import re
import subprocess
import sys
import threading

import httpx
import pytest
from clients import TOKEN, training_server
from fakes import all_episodes

from openenv_pipe.client import (
    AsyncClient,
    Client,
    ClientError,
    RolloutEndedError,
    TrainingEndedError,
)
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.errors import SessionClosedError
from openenv_pipe.extras.judges.judge import open_judge
from openenv_pipe.rewards import Scorer
from openenv_pipe.rewards.reported_numbers import client_metrics
from openenv_pipe.types import Status
from tests.judge_server import JudgeServer
from tests.judged_groups import composed

ALLOWED = {"Authorization": f"Bearer {TOKEN}"}
USER = {"role": "user", "content": "a"}
OTHER = "192.0.2.1"  # an address for documentation: nobody is there


async def play(client, *, reward=None, task=None):
    """Play one episode of two steps; return its rollout."""
    async with client.rollout(task) as rollout:
        reply = await rollout.chat([USER])
        await rollout.step({"text": reply["content"]})
        await rollout.chat([USER, reply, {"role": "user", "content": "b"}])
        await rollout.step({"text": "two"})
        await rollout.finish(reward)
    return rollout


async def report(client, reward, task=None):
    """Play one episode without the environment; return its rollout."""
    async with client.rollout(task) as rollout:
        await rollout.chat([USER])
        await rollout.finish(reward)
    return rollout


async def play_group(server, client):
    """Play the two episodes of a step."""
    collecting = server.collect()
    for _ in range(2):
        assert (await play(client)).status == "done"
    await collecting


async def test_episodes_of_a_client_have_the_engines_ids_and_the_environments_rewards():
    async with training_server("one", "two", "three", "four") as server, server.client() as client:
        collecting = server.collect()
        rollouts = [await play(client) for _ in range(2)]
        (group,) = await collecting
    assert [rollout.status for rollout in rollouts] == ["done", "done"]
    assert rollouts[0].task["messages"] == [{"role": "user", "content": "seen 0"}]
    assert (rollouts[0].group, rollouts[0].group_size) == (group.id, 2)
    turns = [turn for episode in group.episodes for turn in episode.turns]
    for turn, completion in zip(turns, server.engine.completions, strict=True):
        assert (turn.completion_ids, turn.logprobs) == (completion.token_ids, completion.logprobs)
    assert [turns[0].prompt_ids, turns[2].prompt_ids] == server.engine.prompts[::2]
    whole = turns[0].prompt_ids + turns[0].completion_ids + turns[1].prompt_ids
    assert whole == server.engine.prompts[1]
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0]


async def test_a_reported_reward_is_a_last_step():
    async with training_server() as server, server.client() as client:
        collecting = server.collect()
        for reward in (0.25, 0.75):
            async with client.rollout() as rollout:
                await rollout.chat([USER])
                assert await rollout.finish(reward, {"moves": 3}) == "answered"
        (group,) = await collecting
    assert [episode.reward for episode in group.episodes] == [0.25, 0.75]
    (step,) = group.episodes[0].turns[0].steps
    assert step.observation == {"reported": {"reward": 0.25, "metrics": {"moves": 3}}}


async def test_a_client_that_leaves_loses_its_episode_alone():
    async with training_server() as server, server.client() as client, server.client() as other:
        collecting = server.collect(group_size=3)
        async with client.rollout() as rollout:
            await rollout.chat([USER])
        for reward in (0.0, 1.0):
            await report(other, reward)
        (group,) = await collecting
    lost, *played = group.episodes
    assert (lost.status, len(lost.turns)) == (Status.CLIENT_LOST, 1)
    assert [episode.reward for episode in played] == [0.0, 1.0]
    assert group.scored == played


async def test_an_exception_in_the_block_is_reported():
    async with training_server() as server, server.client() as client:
        collecting = server.collect()
        with pytest.raises(KeyError):
            async with client.rollout() as rollout:
                raise KeyError("no such tool")
        assert rollout.status == "client_failed"
        async with client.rollout() as rollout:
            assert await rollout.finish(1.0) == "client_failed"
            with pytest.raises(RolloutEndedError, match="status client_failed: finish or fail was"):
                await rollout.finish(1.0)
        (group,) = await collecting  # with no episode to train on: the run goes on
    assert "KeyError: 'no such tool'" in group.episodes[0].error
    assert "without a call" in group.episodes[1].error


async def test_a_group_whose_time_is_over_has_what_is_done():
    async with training_server() as server, server.client() as client:
        collecting = server.collect(group_size=4)
        for reward in (0.0, 1.0):
            await report(client, reward)
        async with client.rollout() as straggler:
            await straggler.chat([USER])
            server.context.agents.queue.end_time(straggler.group)
            (group,) = await collecting
            with pytest.raises(RolloutEndedError, match="over"):
                await straggler.finish(1.0)
            with pytest.raises(RolloutEndedError):
                await straggler.chat([USER])
    assert len(group.scored) == 2
    late = [episode for episode in group.episodes if episode.status is Status.CLIENT_LATE]
    assert [len(episode.turns) for episode in late] == [1, 0]
    assert "no client opened it" in late[1].error


async def test_a_block_goes_on_after_an_episode_that_the_server_has_ended(caplog):
    """Whatever client of the model raises the error."""
    async with (
        training_server() as server,
        server.client() as client,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        collecting = server.collect(group_size=3)
        async with client.rollout() as straggler:
            server.context.agents.queue.end_time(straggler.group)
            await collecting
            key = {"Authorization": f"Bearer {straggler.api_key}"}
            body = {"model": "policy", "messages": [USER]}
            answer = await http.post("/v1/chat/completions", json=body, headers=key)
            answer.raise_for_status()
        assert straggler.status is None
        collecting = server.collect()
        async with client.rollout() as interrupted:
            collecting.cancel()
            await asyncio.wait([collecting])
            await interrupted.finish(1.0)
        assert interrupted.status is None
        collecting = server.collect()
        for reward in (0.0, 1.0):
            assert (await report(client, reward)).status == "answered"
        await collecting
    lost = [record for record in caplog.records if record.name == "openenv_pipe.client"]
    assert [record.levelname for record in lost] == ["WARNING"] * 2


async def test_who_waits_for_an_episode_is_told_to_come_again_when_the_server_ends():
    async with httpx.AsyncClient(headers=ALLOWED) as http:
        with pytest.raises(InterruptedError):
            async with training_server() as server:
                url = f"{server.url}/rollouts"
                waiting = asyncio.create_task(http.post(url, json={"wait_s": 20}))
                # The other one has arrived.
                assert (await http.post(url, json={})).status_code == 429
                raise InterruptedError
        answer = await waiting
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_block_goes_on_after_the_end_of_its_server():
    """Without an event loop, too. The next one waits for a server until its time is over."""
    is_open, has_ended = threading.Event(), threading.Event()

    def play_past_the_end(url):
        with Client(url, TOKEN) as client:
            with client.rollout() as rollout:
                is_open.set()
                has_ended.wait()
                rollout.chat([USER])
            with client.rollout(timeout_s=0.0):
                pass

    async with training_server() as server:
        collecting = server.collect()
        playing = asyncio.create_task(asyncio.to_thread(play_past_the_end, server.url))
        await asyncio.to_thread(is_open.wait)
        collecting.cancel()
    has_ended.set()
    with pytest.raises(ClientError, match="no episode within the time limit"):
        await playing


async def test_the_time_of_a_group_begins_with_its_first_episode():
    limits = {"group_timeout_s": 0.01, "capacity": 1}
    async with training_server(**limits) as server, server.client() as client:
        collecting = server.collect(group_size=3)
        async with client.rollout():
            (group,) = await collecting
    assert {episode.status for episode in group.episodes} == {Status.CLIENT_LATE}


async def test_whoever_finds_no_episode_is_told_to_come_again():
    async with (
        training_server(capacity=1) as server,
        server.client() as client,
        httpx.AsyncClient(base_url=server.url, headers=ALLOWED) as http,
    ):
        answer = await http.post("/rollouts", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        collecting = server.collect()
        async with client.rollout() as rollout:
            assert (await http.post("/rollouts", json={})).status_code == 429
            waiting = asyncio.create_task(play(client))
            await rollout.chat([USER])
            await rollout.finish(0.5)
        assert (await waiting).status == "done"
        await collecting
        with pytest.raises(ClientError, match="429"):
            async with client.rollout(timeout_s=0.0):
                pass


async def test_several_clients_share_the_groups_of_a_step():
    async with training_server() as server, server.client() as one, server.client() as two:
        collecting = server.collect(num_tasks=3, group_size=4)
        rollouts = await asyncio.gather(*(play(client) for client in [one, two] * 6))
        groups = await collecting
    assert {rollout.status for rollout in rollouts} == {"done"}
    assert sorted(rollout.group for rollout in rollouts) == [
        group.id for group in groups for _ in range(4)
    ]
    assert all(len(episode.turns) == 2 for episode in all_episodes(groups))


async def test_tasks_of_clients_are_groups_of_their_own():
    async with training_server() as server, server.client() as client:
        collecting = server.collect(num_tasks=3)
        own = {"board": [1, 2], "seed": 7}
        a, b, _ = [await report(client, 0.5, task) for task in (own, {"board": []}, None)]
        again = await report(client, 1.0, dict(reversed(own.items())))
        assert (again.group, b.group) != (b.group, a.group)
        assert again.group == a.group
        for task in ({"board": []}, None):
            await report(client, 1.0, task)
        groups = await collecting
    assert [group.task.split for group in groups] == ["client", "client", "train"]
    assert [(group.task.seed, group.task.reset) for group in groups[:2]] == [
        (7, {"board": [1, 2]}),
        (groups[1].task.seed, {"board": []}),
    ]
    assert groups[0].task.id == a.task["id"] != groups[1].task.id
    assert all(episode.task is group.task for group in groups for episode in group.episodes)


async def test_an_episode_without_a_reward_is_judged(tmp_path):
    config = composed("reward=ruler")
    with JudgeServer() as judge_server:
        endpoint = config.judge.model_copy(update={"base_url": judge_server.url})
        async with open_judge(endpoint, tmp_path) as judge:
            changes = {"reward": config.reward.model_dump(), "judge": config.judge.model_dump()}
            scorer = Scorer(config.reward, 1.0, judge)
            server = training_server("b", "x", changes=changes, scorer=scorer)
            async with server as serving, serving.client() as client:
                collecting = serving.collect()
                for _ in range(2):
                    async with client.rollout() as rollout:
                        await rollout.chat([{"role": "user", "content": "b"}])
                        assert await rollout.finish(metrics={"moves": 3}) == "answered"
                (group,) = await collecting
    assert [episode.reward for episode in group.episodes] == [1.0, 0.0]
    assert [client_metrics(episode) for episode in group.episodes] == [{"moves": 3.0}] * 2


async def test_a_report_that_means_nothing_is_rejected_and_can_be_sent_again():
    reports = (
        ({"reward": "high"}, "reward is 'high'"),
        ({"reward": 1e30}, "a number of at most"),
        ({"reward": True}, "reward is True"),
        ({"reward": 1, "metrics": {"a": "b"}}, "metrics has to be"),
        ({"error": 3}, "error is 3"),
        ([], "expected a JSON object"),
        ({}, "report a reward: no step was taken"),
    )
    async with training_server() as server, server.client() as client:
        collecting = server.collect()
        async with client.rollout() as rollout, httpx.AsyncClient(base_url=server.url) as http:
            await rollout.chat([USER])
            for body, said in reports:
                answer = await http.post(f"/rollouts/{rollout.api_key}/end", json=body)
                assert (answer.status_code, said in answer.text) == (422, True), answer.text
            assert await rollout.finish(1.0) == "answered"
        await report(client, 0.0)
        await collecting


async def test_a_request_that_means_nothing_opens_nothing():
    bodies = [({"task": "x"}, "task is 'x'"), ([1], "expected a JSON object")]
    bodies += [({"wait_s": -1}, "wait_s is -1"), ({"wait_s": "long"}, "wait_s is 'long'")]
    for seed in (-1, "7", 7.0, True, None):
        said = f"task has seed={seed!r}; expected"
        bodies.append(({"task": {"board": 7, "seed": seed}}, said))
    async with (
        training_server() as server,
        httpx.AsyncClient(base_url=server.url, headers=ALLOWED) as http,
    ):
        for body, said in bodies:
            answer = await http.post("/rollouts", json=body)
            assert (answer.status_code, said in answer.text) == (422, True), answer.text
        assert (await http.post("/rollouts", content=b"{")).status_code == 400


async def test_only_those_with_the_token_open_episodes():
    async with training_server(token="a-long-token") as server:
        for token, said in ((None, "none was sent"), ("another", "was sent is wrong")):
            async with server.client(token) as client:
                with pytest.raises(
                    ClientError, match=f"needs its token.*{said}.*Client.url, token"
                ):
                    async with client.rollout():
                        pass
        async with server.client("a-long-token") as client:
            await play_group(server, client)


async def test_web_pages_open_nothing():
    async with training_server() as server, httpx.AsyncClient(base_url=server.url) as http:
        headers = ALLOWED | {"Origin": "https://a.example"}
        answer = await http.post("/rollouts", json={}, headers=headers)
        assert answer.status_code == 403


async def test_the_server_makes_a_token_that_clients_find_in_their_environment(monkeypatch):
    told = []
    async with training_server(token=None, notify=told.append) as server:
        async with server.client(None) as client:
            with pytest.raises(ClientError, match="needs its token"):
                async with client.rollout():
                    pass
        (token,) = re.findall(r"token of this server, for clients: (\S+) ", "\n".join(told))
        monkeypatch.setenv("OPENENV_PIPE_TOKEN", token)
        async with server.client(None) as client:
            await play_group(server, client)


async def test_a_lost_environment_is_no_fault_of_the_client():
    """The episode fails, and the client gets another one."""

    def play_then_fail(seed, number, action):
        resets.append(number)
        if len(resets) == 1:
            raise SessionClosedError("the server has died")
        return StepResult({"text": "x"}, None, False)

    resets = []
    async with training_server(play=play_then_fail) as server, server.client() as client:
        collecting = server.collect()
        assert (await report(client, 1.0)).status == "answered"
        (group,) = await collecting
    assert [each.status for each in group.episodes] == [Status.ERROR, Status.ANSWERED]


async def test_the_end_of_training_is_told():
    async with training_server() as server, server.client() as client:
        server.context.agents.queue.end()
        with pytest.raises(TrainingEndedError, match="training has ended"):
            async with client.rollout():
                pass


async def test_a_server_that_is_not_there_is_named(tmp_path):
    async with training_server() as server:
        client = server.client()
    async with client:
        with pytest.raises(ClientError, match="no server answers at"):
            async with client.rollout(timeout_s=0.0):
                pass


async def test_programs_without_an_event_loop_play_too():
    def work(url):
        with Client(f"{url}/v1/", TOKEN) as client, client.rollout() as rollout:
            reply = rollout.chat([USER])
            first = rollout.step({"text": reply["content"]})
            rollout.step({"text": "two"})
            return first.reward, first.done, rollout.finish()

    async with training_server() as server:
        collecting = server.collect()
        results = await asyncio.gather(*(asyncio.to_thread(work, server.url) for _ in range(2)))
        await collecting
    assert results == [(0.5, False, "done")] * 2


def test_the_client_needs_no_torch():
    script = "import sys, json, openenv_pipe.client; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    large = ("torch", "transformers", "numpy", "pydantic", "openenv", "hydra", "aiohttp")
    assert loaded.isdisjoint(large)


async def test_a_server_that_ends_before_it_gives_an_episode_is_asked_again():
    answers = [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n"]

    async def answer(reader, writer):
        await reader.readuntil(b"}")
        writer.write(answers.pop(0))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(TrainingEndedError):
            async with client.rollout(timeout_s=60.0):
                pass
    assert not answers
