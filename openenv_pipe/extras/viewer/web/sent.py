"""What pages send, which only the viewer's own pages can (`access.py`)."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.extras.viewer.web.answers import Answer
from openenv_pipe.system.http_server import BodyError, read_body
from openenv_pipe.system.untrusted_json import parse_request

MAX_SENT_BYTES = 64 * 1024


async def act_on(request: Request, act: Callable[[Mapping[str, Any]], Awaitable[Any]]) -> Response:
    """Answer with what `act` returns for the object that a page has sent, or with its error."""
    try:
        return Answer(await act(await _sent(request)))
    except (PipeError, OSError) as error:
        return Answer({"error": str(error)}, status_code=400)


async def _sent(request: Request) -> Mapping[str, Any]:
    """Read what a page has sent. Raises ConfigError if it is not an object, or too long."""
    try:
        content = await read_body(request.scope, request.receive, max_bytes=MAX_SENT_BYTES)
        value = parse_request(content or b"{}")
    except BodyError as error:
        raise ConfigError(f"{error}; send less, or try again") from error
    except ValueError as error:
        raise ConfigError(f"what was sent is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"what was sent is {value!r:.80}; expected an object")
    return value
