"""First completions of a group, requested together: each member gets what it would get alone."""

import asyncio

import pytest

from openenv_pipe.engines.vllm.answers import Sampled
from openenv_pipe.engines.vllm.group_requests import GroupRequests, SharedRequest, consecutive
from openenv_pipe.errors import EngineError

ASKED = SharedRequest(server=0, prompt=(1, 2), sampling={"max_tokens": 4, "temperature": 1.0})


class Server:
    """Gives completion i of a request the token `seed + i`, as vLLM seeds it."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []
        self.cancelled = 0
        self.delay_s = 0.0

    async def ask(self, asked: SharedRequest, seed: int, count: int) -> list[Sampled]:
        self.requests.append((seed, count))
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if seed >= 900:
            raise EngineError("no")
        tokens = range(seed, seed + count)
        return [Sampled(token_ids=[t], logprobs=[0.0], labels=[]) for t in tokens]


async def test_a_whole_group_is_one_request():
    server = Server()
    first = GroupRequests(server.ask)
    answers = await asyncio.gather(*(first.sample(ASKED, 100, m) for m in (3, 0, 2, 1)))
    assert [answer.token_ids for answer in answers] == [[103], [100], [102], [101]]
    assert server.requests == [(100, 4)]


async def test_who_comes_late_or_never_changes_nothing_for_the_others():
    server = Server()
    first = GroupRequests(server.ask)
    answers = await asyncio.gather(*(first.sample(ASKED, 100, m) for m in (0, 1, 3)))
    late = await first.sample(ASKED, 100, 2)
    assert [answer.token_ids for answer in [*answers, late]] == [[100], [101], [103], [102]]
    assert server.requests == [(100, 2), (103, 1), (102, 1)]


async def test_other_prompts_lengths_servers_and_groups_are_asked_apart():
    server = Server()
    first = GroupRequests(server.ask)
    longer = SharedRequest(server=0, prompt=(1, 2), sampling={**ASKED.sampling, "max_tokens": 5})
    other = SharedRequest(server=0, prompt=(1, 3), sampling=ASKED.sampling)
    elsewhere = SharedRequest(server=1, prompt=(1, 2), sampling=ASKED.sampling)
    await asyncio.gather(
        *(
            first.sample(asked, 100, m)
            for asked in (ASKED, longer, other, elsewhere)
            for m in (0, 1)
        ),
        first.sample(ASKED, 200, 0),
    )
    assert sorted(server.requests) == [(100, 2)] * 4 + [(200, 1)]


async def test_a_cancelled_member_leaves_the_others_and_the_last_ends_the_request():
    server = Server()
    server.delay_s = 600.0
    first = GroupRequests(server.ask)
    tasks = [asyncio.create_task(first.sample(ASKED, 100, member)) for member in range(3)]
    while not server.requests:
        await asyncio.sleep(0.001)
    for number, task in enumerate(tasks):
        assert server.cancelled == 0, number
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
    async with asyncio.timeout(60.0):
        while not server.cancelled:
            await asyncio.sleep(0.001)
    assert server.cancelled == 1


async def test_an_error_reaches_all_who_wait():
    first = GroupRequests(Server().ask)
    tasks = [asyncio.create_task(first.sample(ASKED, 900, member)) for member in range(3)]
    for task in tasks:
        with pytest.raises(EngineError, match="no"):
            await task


def test_runs_are_cut_where_one_is_missing():
    assert consecutive([]) == []
    assert consecutive([0, 1, 2, 4, 6, 7]) == [[0, 1, 2], [4], [6, 7]]
