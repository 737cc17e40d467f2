"""OpenEnv's capture proxy, imported without the rest of OpenEnv.

`import openenv.core` imports gradio and fastmcp too, which takes four seconds of processor time,
and the proxy uses neither. Its modules are therefore imported from their folder, below a package of
another name, so that Python does not run `openenv/core/__init__.py`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from openenv_pipe.errors import ConfigError

_PARENT = "openenv_pipe_capture_parent"  # stands for openenv.core.harness


def _module(name: str) -> ModuleType:
    if _PARENT not in sys.modules:
        spec = importlib.util.find_spec("openenv")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError("the package openenv is not installed; agent=program needs it")
        parent = ModuleType(_PARENT)
        parent.__path__ = [str(Path(spec.submodule_search_locations[0], "core", "harness"))]
        sys.modules[_PARENT] = parent
    return importlib.import_module(f"{_PARENT}.capture.{name}")


_server, _sessions, _upstream = _module("server"), _module("sessions"), _module("upstream")
_dialects, _detection = _module("dialects"), _module("detection")
APIType = _detection.APIType
OpenAIChatTransformer = _dialects.OpenAIChatTransformer
OpenAIResponsesTransformer = _dialects.OpenAIResponsesTransformer
TransformManager = _dialects.TransformManager
create_app = _server.create_app
UpstreamPool = _server.UpstreamPool
Session = _sessions.Session
Upstream = _sessions.Upstream
extract_api_key = _sessions.extract_api_key
UpstreamHTTPError = _upstream.UpstreamHTTPError
UpstreamRequestError = _upstream.UpstreamRequestError


def model_endpoint(app: Any) -> Callable[[str, Request], Awaitable[Response]]:
    """Return the function of the proxy that answers calls of the model, by path and request.

    Called by itself it costs less than half of what it does behind FastAPI's layers.
    """
    (endpoint,) = (each.endpoint for each in app.routes if each.path == "/{path:path}")
    return cast(Callable[[str, Request], Awaitable[Response]], endpoint)
