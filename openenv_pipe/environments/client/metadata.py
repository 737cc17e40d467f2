"""What a running environment server declares over HTTP at GET /schema and /metadata."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from openenv_pipe.environments.schemas import Schema, require_schema
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import OPEN, Access, fetch_object

TIME_LIMIT_S = 10.0
# Fields of these names probably contain the answer, so suggested templates leave them out.
ANSWER_FIELD_NAMES = frozenset(
    {"answer", "solution", "secret", "ground_truth", "correct_answer", "expected_answer"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMetadata:
    """Name, description and JSON Schemas of an environment."""

    name: str  # empty if the server gives none
    text: str  # the description, or empty
    action: Schema
    first_observation: Schema  # the schema of reset's observation
    observation: Schema  # the schema of step's observation


async def fetch_metadata(url: str, access: Access = OPEN) -> ServerMetadata:
    """Fetch the metadata of the server at `url` (http, https, or a unix socket's).

    Raises ConfigError: The server does not answer, or not as an OpenEnv server does.
    """
    get = partial(fetch_object, url, timeout_s=TIME_LIMIT_S, access=access)
    schemas = await get("/schema")
    observation: Any = schemas.get("observation")
    first: Any = schemas.get("reset_observation", observation)  # older servers have one for both
    if not all(isinstance(each, dict) for each in (schemas.get("action"), observation, first)):
        raise ConfigError(
            f"{url}/schema has no schemas of an action and an observation, but "
            f"{', '.join(schemas)[:200] or 'nothing'}; is it an OpenEnv server?"
        )
    named = {"action": schemas["action"], "observation": observation, "reset_observation": first}
    for name, schema in named.items():
        require_schema(schema, f"{url}/schema: the schema {name!r}")
    try:
        metadata = await get("/metadata")
    except ConfigError:
        metadata = {}  # Some servers fail at /metadata and work otherwise.
    return ServerMetadata(
        name=str(metadata.get("name") or ""),
        text=str(metadata.get("description") or ""),
        action=schemas["action"],
        first_observation=first,
        observation=observation,
    )
