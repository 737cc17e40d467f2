"""Engine `openai`: any endpoint with OpenAI's chat completions. For evaluation only."""

from openenv_pipe.engines.openai.client import ChatClient, num_reported_tokens
from openenv_pipe.engines.openai.engine import OpenAIEngine

__all__ = ["ChatClient", "OpenAIEngine", "num_reported_tokens"]
