"""The components of a run, which its stages use. `build` creates and closes them."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from openenv_pipe.config.schema import POLICY, UNTRAINED, RunConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.engines.local import FrozenPolicy
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.learner.devices import Devices
from openenv_pipe.models.policy import Policy
from openenv_pipe.rollout import RolloutContext
from openenv_pipe.system.resources import load_callable
from openenv_pipe.system.tasks import in_thread

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """The policy and torch's thread, and the rollout context if episodes are played."""

    config: RunConfig
    policy: Policy | None  # None: an engine that needs no tokenizer, such as openai
    torch_thread: ThreadPoolExecutor  # runs torch work, so that it never blocks the event loop
    devices: Devices  # that the policy learns on
    rollout: RolloutContext | None = None  # None: the run learns from recorded episodes

    async def compute(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run torch work in its thread, while sessions stay alive on the event loop."""
        return await in_thread(self.torch_thread, partial(function, *args, **kwargs))


def build_roles(
    config: RunConfig, roles: Mapping[str, str], engine: Engine
) -> dict[str, Engine | str]:
    """Return the roles of a game with an engine for each player that the policy does not play.

    engine: the policy's; it has the checkpoint that `eval.opponent` names. Raises ConfigError.
    """
    scripted = config.env.baselines
    return {
        player: role
        if role in (POLICY, UNTRAINED)
        else ScriptedEngine(load_callable(scripted[role]))
        if role in scripted
        else FrozenPolicy(engine, role)
        for player, role in roles.items()
    }


def with_scripted_policy(rollout: RolloutContext, policy: str) -> RolloutContext:
    """Return the context with a scripted policy, the function `module:name`, as its engine.

    Raises ConfigError.
    """
    return rollout.with_engine(ScriptedEngine(load_callable(policy)))
