"""Engine `openai`: any endpoint that speaks OpenAI's chat completions. Evaluation only."""

from openenv_pipe.engines.openai.client import ChatClient
from openenv_pipe.engines.openai.engine import OpenAIEngine
from openenv_pipe.engines.openai.text_chat import TextChat

__all__ = ["ChatClient", "OpenAIEngine", "TextChat"]
