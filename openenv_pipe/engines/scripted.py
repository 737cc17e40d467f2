"""Engine `scripted`: replies of a policy written in Python. For warm starts, baselines, tests."""

import random
from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue

from openenv_pipe.chat import ChatFormat
from openenv_pipe.engines.base import Completion, Request
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Finish, Observation

Policy = Callable[[Sequence[Observation], random.Random], str]
VERSION = 0


class ScriptedEngine:
    """Asks the policy with the observations so far and a generator seeded by episode and turn.

    Its completions have logprob 0: they were not sampled, and nothing may train on their ratio.
    """

    max_episodes = 1024
    publishes_in_flight = True

    def __init__(self, policy: Policy, chat: ChatFormat) -> None:
        self._policy = policy
        self._chat = chat

    def expect(self, num_episodes: int, limit: int) -> int:
        return 0

    async def generate(self, request: Request) -> Completion:
        draw = random.Random(f"{request.seed}/{request.turn}")
        token_ids = self._chat.reply_ids(self._reply(request.observations, draw))
        cut = len(token_ids) > request.max_tokens
        token_ids = token_ids[: request.max_tokens]
        return Completion(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            finish=Finish.LENGTH if cut else Finish.STOP,
            policy_versions=[VERSION],
        )

    def _reply(self, observations: Sequence[Observation], draw: random.Random) -> str:
        name = f"{self._policy.__module__}:{self._policy.__qualname__}"
        try:
            reply = self._policy(observations, draw)
        except Exception as error:  # whatever a user's policy does
            fields = ", ".join(sorted(observations[-1]))
            raise ConfigError(
                f"the scripted policy {name} raised {type(error).__name__}: {error}; the "
                f"observation has {fields}"
            ) from error
        if not isinstance(reply, str):
            raise ConfigError(f"the scripted policy {name} returned {reply!r}, expected a string")
        return reply

    def finish(self, episode: int) -> None:
        """Nothing is kept."""

    async def publish(self, version: int) -> None:
        """A script does not learn."""

    async def metrics(self) -> Mapping[str, float]:
        """Nothing is measured."""
        return {}

    def facts(self) -> Mapping[str, JsonValue]:
        """The configuration says it all."""
        return {}
