"""What a running environment server says about itself over HTTP: GET /schema and /metadata.

Refused here: sessions, and judging what is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import OPEN, Access, ask_object

TIME_LIMIT_S = 10.0

Schema = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """An environment in its own words."""

    name: str  # empty if it gives none
    text: str  # a sentence or so, or empty
    action: Schema
    first_observation: Schema  # of reset
    observation: Schema  # of step


async def describe(url: str, access: Access = OPEN) -> Description:
    """Ask the server at `url` (http, https, or a unix socket's).

    Raises ConfigError if it does not answer, or not as an OpenEnv server does.
    """
    get = partial(ask_object, url, timeout_s=TIME_LIMIT_S, access=access)
    schemas = await get("/schema")
    observation = schemas.get("observation")
    first = schemas.get("reset_observation", observation)  # older servers have one for both
    if not all(isinstance(each, dict) for each in (schemas.get("action"), observation, first)):
        raise ConfigError(
            f"{url}/schema has no schemas of an action and an observation, but "
            f"{', '.join(schemas) or 'nothing'}; is it an OpenEnv server?"
        )
    try:
        metadata = await get("/metadata")
    except ConfigError:
        metadata = {}  # it may raise there, and is a server none the less
    return Description(
        name=str(metadata.get("name") or ""),
        text=str(metadata.get("description") or ""),
        action=schemas["action"],
        first_observation=first,
        observation=observation,
    )
