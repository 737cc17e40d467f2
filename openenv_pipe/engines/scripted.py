"""Engine `scripted`: replies of a policy written in Python. For warm starts, baselines, tests."""

import inspect
import random
from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue

from openenv_pipe.config.schema import ScriptedEngineConfig
from openenv_pipe.engines.base import Completion, Request
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.models.chat_template import ChatFormat
from openenv_pipe.types import Finish, Observation, Opening

Policy = Callable[..., str]  # (observations, random) -> reply; a parameter `opening` is filled in
Replies = Callable[[Sequence[Observation], random.Random, Opening], str]
VERSION = 0


class ScriptedEngine:
    """Asks the policy with the observations so far and a generator seeded by episode and turn.

    Its completions have logprob 0: they were not sampled, and nothing may train on their ratio.
    """

    max_episodes = 1024
    capabilities = ScriptedEngineConfig.capabilities

    def __init__(self, policy: Policy, chat: ChatFormat) -> None:
        self._reply = replies_of(policy)
        self._chat = chat

    def expect(self, num_episodes: int, limit: int) -> int:
        return 0

    async def generate(self, request: Request) -> Completion:
        draw = random.Random(f"{request.seed}/{request.turn}")
        reply = self._reply(request.observations, draw, request.opening)
        token_ids = self._chat.reply_ids(reply)
        cut = len(token_ids) > request.max_tokens
        token_ids = token_ids[: request.max_tokens]
        return Completion(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            finish=Finish.LENGTH if cut else Finish.STOP,
            policy_versions=[VERSION],
        )

    def finish(self, episode: int) -> None:
        """Nothing is kept."""

    async def begin_update(self, *, idle: bool) -> None:
        """A script has no part in it."""

    async def publish(self, version: int) -> None:
        """A script does not learn."""

    async def metrics(self) -> Mapping[str, float]:
        """Nothing is measured."""
        return {}

    def facts(self) -> Mapping[str, JsonValue]:
        """The configuration says it all."""
        return {}


def replies_of(policy: Policy) -> Replies:
    """The policy's replies, which raise ConfigError for whatever is wrong with it."""
    name = f"{policy.__module__}:{policy.__qualname__}"
    takes_opening = "opening" in inspect.signature(policy).parameters

    def reply(observations: Sequence[Observation], draw: random.Random, opening: Opening) -> str:
        more = {"opening": opening} if takes_opening else {}
        try:
            written = policy(observations, draw, **more)
        except PipeError:
            raise
        except Exception as error:  # whatever a user's policy does
            fields = ", ".join(sorted(observations[-1]))
            raise ConfigError(
                f"the scripted policy {name} raised {type(error).__name__}: {error}; the "
                f"observation has {fields}"
            ) from error
        if not isinstance(written, str):
            raise ConfigError(f"the scripted policy {name} returned {written!r}, expected a string")
        return written

    return reply
