"""What an engine of a user's own returns is a reply to the request, or an error that names it."""

from dataclasses import replace

import pytest

from openenv_pipe.engines.base import (
    Completion,
    MessageRequest,
    StaticEngine,
    TextReply,
    TokenRequest,
)
from openenv_pipe.engines.checked import CheckedEngine
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Finish

SAMPLING = {"episode": 0, "turn": 0, "max_tokens": 3, "temperature": 1.0, "seed": 0}
TOKENS = TokenRequest(**SAMPLING, prompt_ids=[1])
MESSAGES = MessageRequest(**SAMPLING, messages=[])
RIGHT = Completion(token_ids=[5, 6], logprobs=[-1.0, -2], finish=Finish.STOP, policy_versions=[0])


class Fixed(StaticEngine):
    max_episodes = 7

    def __init__(self, reply):
        self._reply = reply

    async def generate(self, request):
        return self._reply


def checked(reply, vocabulary_size=10):
    return CheckedEngine(Fixed(reply), "engine.target='mine:Engine'", vocabulary_size)


async def test_a_reply_to_the_request_passes():
    engine = checked(RIGHT)
    assert await engine.generate(TOKENS) == RIGHT
    assert engine.max_episodes == 7
    far = replace(RIGHT, token_ids=[5, 10**6])
    assert await checked(far, None).generate(TOKENS) == far
    assert await checked(TextReply(text="hi")).generate(MESSAGES) == TextReply(text="hi")


@pytest.mark.parametrize(
    ("request_", "reply", "words"),
    [
        (TOKENS, None, "returned None; expected a Completion"),
        (TOKENS, TextReply(text="hi"), "expected a Completion"),
        (TOKENS, replace(RIGHT, logprobs=[-1.0]), "it has 2 token_ids and 1 logprobs"),
        (TOKENS, replace(RIGHT, logprobs=[-1.0, None]), r"numbers \(int or float\) as logprobs"),
        (TOKENS, replace(RIGHT, token_ids=(5, 6)), r"numbers \(int\) as token_ids"),
        (TOKENS, replace(RIGHT, token_ids=[5.0, 6.0]), r"numbers \(int\) as token_ids"),
        (TOKENS, replace(RIGHT, token_ids=[], logprobs=[]), "it has 0 token_ids, expected 1 to 3"),
        (TOKENS, replace(RIGHT, token_ids=[5] * 4), "it has 4 token_ids, expected 1 to 3"),
        (TOKENS, replace(RIGHT, token_ids=[5, 10]), "token 10 is not in the vocabulary of 10"),
        (TOKENS, replace(RIGHT, token_ids=[-1, 5]), "token -1 is not in the vocabulary"),
        (TOKENS, replace(RIGHT, policy_versions=[]), "it has no policy_versions"),
        (TOKENS, replace(RIGHT, finish="length"), "expected a Finish as finish"),
        (MESSAGES, RIGHT, "expected a TextReply with a text"),
        (MESSAGES, TextReply(text=None), "expected a TextReply with a text"),
    ],
)
async def test_another_reply_is_rejected(request_, reply, words):
    with pytest.raises(ConfigError, match=words) as caught:
        await checked(reply).generate(request_)
    assert str(caught.value).startswith("engine.target='mine:Engine': generate returned ")
