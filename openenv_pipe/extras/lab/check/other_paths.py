"""What a server offers beyond OpenEnv."""

from openenv_pipe.environments.client.metadata import TIME_LIMIT_S
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import OPEN, Access, fetch_object

OPENENV = "0.10"  # the newest release whose servers this program knows
KNOWN_PATHS = frozenset(
    {
        *("/health", "/schema", "/metadata", "/state", "/reset", "/step", "/mcp"),
        *("/list_environments", "/{env_name}/splits", "/{env_name}/tasks"),
        *("/{env_name}/num_tasks", "/{env_name}/task", "/{env_name}/task_range"),
    }
)
WEB_PAGE = "/web"  # where OpenEnv has its page for people, and what that page calls
MAX_PATHS = 10
MAX_PATH_LENGTH = 100


async def describe_unknown_paths(url: str, access: Access = OPEN) -> str | None:
    """Return a sentence on what a server offers beyond OpenEnv's release `OPENENV`; None: nothing.

    It is read from /openapi.json, which servers made with FastAPI have.
    """
    try:
        described = await fetch_object(url, "/openapi.json", timeout_s=TIME_LIMIT_S, access=access)
    except ConfigError:
        return None
    paths = described.get("paths")
    unknown = sorted(
        str(path)[:MAX_PATH_LENGTH]
        for path in (paths if isinstance(paths, dict) else {})
        if path not in KNOWN_PATHS and path != "/" and not str(path).startswith(WEB_PAGE)
    )
    if not unknown:
        return None
    more = f" and {len(unknown) - MAX_PATHS} more" if len(unknown) > MAX_PATHS else ""
    return (
        f"the server offers {', '.join(unknown[:MAX_PATHS])}{more}, which openenv-pipe does not "
        f"use: paths of the environment's own, or of an OpenEnv newer than {OPENENV}"
    )
