"""Replies of the engine that are given once more when an episode is played again."""

import asyncio

import pytest

from openenv_pipe.engines.base import Completion, MessageRequest, TextReply, TokenRequest
from openenv_pipe.errors import EngineError, SessionError
from openenv_pipe.rollout.cluster.replies import EpisodeReplies
from openenv_pipe.types import Finish


class CountingEngine:
    """Samples the length of the whole conversation, as one token."""

    def __init__(self):
        self.requests = []
        self.ids = []

    async def generate(self, request):
        self.requests.append(request)
        if isinstance(request, MessageRequest):
            return TextReply(text=str(len(self.requests)))
        if request.seed == 13:
            raise EngineError("no answer")
        self.ids = [*self.ids[: request.num_kept], *request.new_ids]
        self.ids.append(1000 + len(self.ids))
        return Completion(
            token_ids=self.ids[-1:], logprobs=[0.0], finish=Finish.STOP, policy_versions=[0]
        )


def tokens(turn, *new_ids, seed=0):
    return TokenRequest(
        episode=0, turn=turn, max_tokens=4, temperature=1.0, seed=seed, new_ids=list(new_ids)
    )


def messages(turn, text):
    return MessageRequest(
        episode=0,
        turn=turn,
        max_tokens=4,
        temperature=1.0,
        seed=0,
        new_messages=[{"role": "user", "content": text}],
    )


async def test_an_episode_that_repeats_itself_asks_the_engine_nothing_twice():
    engine = CountingEngine()
    replies = EpisodeReplies(engine)
    first = [await replies.reply(tokens(0, 1, 2)), await replies.reply(tokens(1, 3))]
    replies.repeat()
    again = [await replies.reply(tokens(0, 1, 2)), await replies.reply(tokens(1, 3))]
    assert again == first
    assert len(engine.requests) == 2
    assert (await replies.reply(tokens(2, 4))).token_ids == [1006]
    assert engine.ids == [1, 2, 1002, 3, 1004, 4, 1006]


async def test_an_episode_that_differs_goes_on_from_the_tokens_that_are_the_same():
    engine = CountingEngine()
    replies = EpisodeReplies(engine)
    for turn, new_ids in enumerate([(1, 2), (3, 4), (5,)]):
        await replies.reply(tokens(turn, *new_ids))
    replies.repeat()
    await replies.reply(tokens(0, 1, 2))
    assert (await replies.reply(tokens(1, 3, 9))).token_ids == [1005]
    assert engine.requests[-1].num_kept == 4 and engine.requests[-1].new_ids == [9]
    assert engine.ids == [1, 2, 1002, 3, 9, 1005]
    await replies.reply(tokens(2, 5))
    replies.repeat()  # a second worker is lost
    for turn, new_ids in enumerate([(1, 2), (3, 9), (5,)]):
        await replies.reply(tokens(turn, *new_ids))
    assert engine.ids == [1, 2, 1002, 3, 9, 1005, 5, 1007]
    assert len(engine.requests) == 5


async def test_a_shorter_prompt_still_leaves_the_engine_a_token_to_compute():
    engine = CountingEngine()
    replies = EpisodeReplies(engine)
    await replies.reply(tokens(0, 1, 2, 3))
    replies.repeat()
    await replies.reply(tokens(0, 1, 2))
    assert engine.requests[-1].num_kept == 1 and engine.requests[-1].new_ids == [2]
    assert engine.ids == [1, 2, 1002]


async def test_messages_cannot_be_taken_back():
    replies = EpisodeReplies(CountingEngine())
    said = await replies.reply(messages(0, "one"))
    replies.repeat()
    assert await replies.reply(messages(0, "one")) == said
    replies.repeat()
    with pytest.raises(SessionError, match="did not repeat the episode"):
        await replies.reply(messages(0, "another"))


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
    assert engine.ids == [1, 2, 1002]
