"""Replies of the engine that are given once more when an episode is played again."""

import asyncio
from dataclasses import replace

import pytest

from openenv_pipe.engines.base import Completion, MessageRequest, TextReply, TokenRequest
from openenv_pipe.errors import EngineError
from openenv_pipe.extras.cluster.remote_worker import EpisodeReplies
from openenv_pipe.types import Finish


class CountingEngine:
    """Samples one token, which names the length of the prompt."""

    def __init__(self):
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        if isinstance(request, MessageRequest):
            return TextReply(text=str(len(self.requests)))
        if request.seed == 13:
            raise EngineError("no answer")
        return Completion(
            token_ids=[1000 + len(request.prompt_ids)],
            logprobs=[0.0],
            finish=Finish.STOP,
            policy_versions=[0],
        )


def tokens(turn, *prompt_ids, seed=0):
    return TokenRequest(
        episode=0, turn=turn, max_tokens=4, temperature=1.0, seed=seed, prompt_ids=list(prompt_ids)
    )


def messages(turn, text):
    return MessageRequest(
        episode=0,
        turn=turn,
        max_tokens=4,
        temperature=1.0,
        seed=0,
        messages=[{"role": "user", "content": str(text)}],
    )


async def test_an_episode_that_repeats_itself_asks_the_engine_nothing_twice():
    engine = CountingEngine()
    replies = EpisodeReplies(engine)
    first = [await replies.reply(tokens(0, 1, 2)), await replies.reply(tokens(1, 1, 2, 1002, 3))]
    replies.repeat()
    again = [await replies.reply(tokens(0, 1, 2)), await replies.reply(tokens(1, 1, 2, 1002, 3))]
    assert again == first
    assert len(engine.requests) == 2
    assert (await replies.reply(tokens(2, 1, 2, 1002, 3, 1004, 4))).token_ids == [1006]


@pytest.mark.parametrize("make", [tokens, messages])
async def test_an_episode_that_differs_gets_replies_to_its_own_prompts(make):
    engine = CountingEngine()
    replies = EpisodeReplies(engine)
    for turn, given in enumerate((1, 2, 3)):
        await replies.reply(make(turn, given))
    replies.repeat()
    await replies.reply(make(0, 1))
    another = await replies.reply(make(1, 9))
    assert engine.requests[3:] == [make(1, 9)]
    last = await replies.reply(make(2, 3))  # follows another prompt, so it is asked again
    assert engine.requests[3:] == [make(1, 9), make(2, 3)]
    replies.repeat()  # a second worker is lost
    await replies.reply(make(0, 1))
    assert [await replies.reply(make(1, 9)), await replies.reply(make(2, 3))] == [another, last]
    assert len(engine.requests) == 5


async def test_requests_that_differ_anywhere_are_not_taken_for_each_other():
    engine = CountingEngine()
    given = tokens(0, 1, 2)
    changes = ({"seed": 1}, {"turn": 1}, {"max_tokens": 5}, {"num_sampled": 1}, {"prompt_ids": [1]})
    for changed in (replace(given, **each) for each in changes):
        replies = EpisodeReplies(engine)
        await replies.reply(given)
        replies.repeat()
        await replies.reply(changed)
        assert engine.requests[-2:] == [given, changed]


async def test_the_engines_error_is_raised():
    replies = EpisodeReplies(CountingEngine())
    with pytest.raises(EngineError, match="no answer"):
        await replies.reply(tokens(0, 1, seed=13))


async def test_an_episode_whose_replay_ends_sooner_waits_for_the_engine():
    asked, answered = asyncio.Event(), asyncio.Event()

    class WaitingEngine(CountingEngine):
        async def generate(self, request):
            asked.set()
            await answered.wait()
            return await super().generate(request)

    engine = WaitingEngine()
    replies = EpisodeReplies(engine)
    lost = asyncio.create_task(replies.reply(tokens(0, 1, 2)))
    await asked.wait()
    lost.cancel()  # with its worker
    replies.repeat()
    settling = asyncio.create_task(replies.settle())
    await asyncio.sleep(0)
    assert not settling.done()
    answered.set()
    await settling
    assert [each.prompt_ids for each in engine.requests] == [[1, 2]]
