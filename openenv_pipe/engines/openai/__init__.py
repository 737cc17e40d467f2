"""Engine `openai`: any endpoint with OpenAI's chat completions. For evaluation only."""

from openenv_pipe.engines.openai.client import ChatClient
from openenv_pipe.engines.openai.engine import OpenAIEngine

__all__ = ["ChatClient", "OpenAIEngine"]
