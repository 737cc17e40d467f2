"""Engine `scripted`: replies of a policy in Python, for warm starts, baselines and tests."""

import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from openenv_pipe.config.schema import ScriptedEngineConfig
from openenv_pipe.engines.base import ObservationRequest, StaticEngine, TextReply
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.system.python_targets import call_problem, takes_keyword
from openenv_pipe.system.user_code import UserCode, UserCodeError
from openenv_pipe.types import Observation, Opening

ScriptedPolicy = Callable[..., str]  # (observations, random) -> reply; may have a third, `opening`
Replies = Callable[[Sequence[Observation], random.Random, Opening], Coroutine[Any, Any, str]]


class ScriptedEngine(StaticEngine):
    """Calls the policy with the observations so far and a generator seeded by episode and turn."""

    capabilities = ScriptedEngineConfig.capabilities
    max_episodes = 1024

    def __init__(self, policy: ScriptedPolicy) -> None:
        self._reply = replies_of(policy)

    async def generate(self, request: ObservationRequest) -> TextReply:
        """Return the policy's reply. Raises ConfigError if the policy fails or returns no text."""
        draw = random.Random(f"{request.seed}/{request.turn}")
        return TextReply(text=await self._reply(request.observations, draw, request.opening))


def replies_of(policy: ScriptedPolicy) -> Replies:
    """Wrap the policy in a function that calls it as user code.

    Raises ConfigError: the policy cannot be called with observations and a random generator.
    """
    # An object with __call__ has no name of its own.
    name = f"{policy.__module__}:{getattr(policy, '__qualname__', type(policy).__qualname__)}"
    takes_opening = takes_keyword(policy, "opening")
    if problem := call_problem(policy, None, None, **({"opening": None} if takes_opening else {})):
        raise ConfigError(
            f"the scripted policy {name} cannot be called with (observations, random): {problem}"
        )
    code = UserCode(f"the scripted policy {name}", passed=(PipeError,))

    async def reply(
        observations: Sequence[Observation], draw: random.Random, opening: Opening
    ) -> str:
        more = {"opening": opening} if takes_opening else {}
        try:
            written = await code.call(policy, observations, draw, **more)
        except UserCodeError as error:
            fields = ", ".join(sorted(observations[-1]))
            raise ConfigError(f"{error}; the fields of the observation are {fields}") from error
        if not isinstance(written, str):
            raise ConfigError(f"the scripted policy {name} returned {written!r}, expected a string")
        return written

    return reply
