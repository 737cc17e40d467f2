"""Random actions for any environment and adapter, drawn from what the server publishes."""

import random
from collections.abc import Sequence

from openenv_pipe.commands.recorded_play import reset
from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.adapters.json import without_metadata
from openenv_pipe.environments.adapters.tool import call_action, tools_of
from openenv_pipe.environments.client.session import LIST_TOOLS, step_aside
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.random_policy import draw_action, draw_call
from openenv_pipe.environments.schemas import Schema
from openenv_pipe.errors import ConfigError, StepRejectedError
from openenv_pipe.extras.lab.episodes import Chooser
from openenv_pipe.types import Action, Observation, Task, Tool


def calls_tools(schema: Schema) -> bool:
    """True for the actions of an MCP environment: calls of tools, or also the list of them."""
    parts = [schema, *schema.get("$defs", {}).values()]
    fields = [part.get("properties", {}) for part in parts if isinstance(part, dict)]
    return any("tool_name" in each for each in fields)


def random_actions(schema: Schema, tools: Sequence[Tool]) -> Chooser:
    """Choose one random action per turn for any adapter: a call of a tool if there are tools."""
    own = without_metadata(schema)

    def choose(observations: Sequence[Observation], draw: random.Random) -> Sequence[Action]:
        if tools:
            return [call_action(**draw_call(tools, draw))]
        return [draw_action(own, observations, draw)]

    return choose


async def session_tools(env: EnvConfig, host: Host, task: Task, schema: Schema) -> Sequence[Tool]:
    """Return the tools of an MCP environment; none for any other.

    Without fields of its own, an action may be one, which is asked.
    """
    has_fields = bool(without_metadata(schema).get("properties"))
    if has_fields and not calls_tools(schema):
        return ()
    async with host.session() as session:
        await reset(session, task, env)
        try:
            return tools_of(await step_aside(session, env.step_timeout_s, LIST_TOOLS))
        except (ConfigError, StepRejectedError):
            if has_fields:
                raise
            return ()
        finally:
            await session.close()
