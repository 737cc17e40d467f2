"""Where completions come from: one module or folder for each type of engine."""

from openenv_pipe.config.schema import EngineCapabilities
from openenv_pipe.engines.base import (
    Completion,
    Engine,
    MessageRequest,
    ObservationRequest,
    TextReply,
    TokenRequest,
)

__all__ = [
    "Completion",
    "Engine",
    "EngineCapabilities",
    "MessageRequest",
    "ObservationRequest",
    "TextReply",
    "TokenRequest",
]
