"""Between an environment and a chat model: observations to messages, replies to actions."""

from openenv_pipe.adapters.base import Adapter, UnusableReply
from openenv_pipe.adapters.text import TextAdapter
from openenv_pipe.config.schema import AdapterConfig, PythonAdapterConfig
from openenv_pipe.resources import load_callable

__all__ = ["Adapter", "UnusableReply", "build_adapter"]


def build_adapter(config: AdapterConfig) -> Adapter:
    """The adapter that the block names."""
    if isinstance(config, PythonAdapterConfig):
        return load_callable(config.target)(**config.options)
    return TextAdapter(config)
