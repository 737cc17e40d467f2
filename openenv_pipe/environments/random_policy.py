"""A scripted policy for any environment: random actions drawn from the JSON Schemas.

Use `openenv_pipe.environments.random_policy:random_action` for warm starts and baselines where no
scripted policy was written. Of the observations, it uses only a list of legal actions. It ignores
what a schema says only in a regular expression or in prose: the environment rejects such actions,
and a policy written for it does better.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

from openenv_pipe.environments.adapters.templates import compact_json
from openenv_pipe.environments.random_values import draw_value
from openenv_pipe.environments.schemas import Schema
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Observation, Opening, Tool

LEGAL = re.compile(r"(legal|valid|available|possible)_(actions|moves)")  # names of a field


def random_action(
    observations: Sequence[Observation], draw: random.Random, *, opening: Opening
) -> str:
    """Draw a call of any tool, or any object of the action's schema.

    Raises ConfigError: The opening has neither tools nor a schema, as with plain text actions.
    """
    if opening.tools:
        return f"<tool_call>{compact_json(draw_call(opening.tools, draw))}</tool_call>"
    if opening.action_schema:
        return compact_json(draw_action(opening.action_schema, observations, draw))
    raise ConfigError(
        "openenv_pipe.environments.random_policy:random_action needs env.adapter.type=json or "
        "tool, which describe the actions; for text or python, write a policy: "
        "a function (observations, random) -> reply, given as module:name"
    )


def draw_action(
    schema: Schema, observations: Sequence[Observation], draw: random.Random
) -> dict[str, Any]:
    """Draw an action; a single required field takes a legal action last observed, if any."""
    action: dict[str, Any] = draw_value(schema, draw)
    required = schema.get("required", [])
    legal = _legal_actions(observations[-1]) if observations else []
    if len(required) == 1 and legal and type(legal[0]) is type(action[required[0]]):
        action[required[0]] = draw.choice(legal)
    return action


def _legal_actions(observation: Observation) -> Sequence[Any]:
    """Return the actions that an observation lists as legal; empty if it has no such list."""
    for name, value in observation.items():
        if LEGAL.fullmatch(name) and isinstance(value, list) and value:
            return value
    return []


def draw_call(tools: Sequence[Tool], draw: random.Random) -> dict[str, Any]:
    function = draw.choice(tools)["function"]
    return {"name": function["name"], "arguments": draw_value(function["parameters"], draw)}
