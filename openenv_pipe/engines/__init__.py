"""Where tokens come from."""

from openenv_pipe.config.schema import EngineCapabilities
from openenv_pipe.engines.base import Completion, Engine, Request

__all__ = ["Completion", "Engine", "EngineCapabilities", "Request"]
