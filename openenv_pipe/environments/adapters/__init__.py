"""Adapters translate observations to chat messages, and replies to actions."""

from collections.abc import Mapping, Sequence
from typing import Any

from openenv_pipe.config.schema import (
    AdapterConfig,
    JsonAdapterConfig,
    PythonAdapterConfig,
    ToolAdapterConfig,
)
from openenv_pipe.environments.adapters.base import Adapter, UnusableReply
from openenv_pipe.environments.adapters.json import JsonAdapter
from openenv_pipe.environments.adapters.text import TextAdapter
from openenv_pipe.environments.adapters.tool import ToolAdapter
from openenv_pipe.environments.adapters.user import UserAdapter
from openenv_pipe.environments.client.metadata import fetch_metadata
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import OPEN, Access

__all__ = ["Adapter", "UnusableReply", "adapter_for", "build_adapter"]


async def adapter_for(config: AdapterConfig, urls: Sequence[str], access: Access = OPEN) -> Adapter:
    """Build the adapter of a config block for the environment served at `urls`.

    Raises:
        ConfigError: The block is invalid or does not fit the server's action, or the adapter
            needs the server's schema and cannot get it.
    """
    if isinstance(config, JsonAdapterConfig):
        return build_adapter(config, (await fetch_metadata(urls[0], access)).action)
    adapter = build_adapter(config)
    if isinstance(adapter, TextAdapter) and urls:
        try:
            schema = (await fetch_metadata(urls[0], access)).action
        except ConfigError:  # Some servers have no schema and work otherwise.
            return adapter
        adapter.reject_unknown_fields(schema)
    return adapter


def build_adapter(config: AdapterConfig, action_schema: Mapping[str, Any] | None = None) -> Adapter:
    """Build the adapter of a config block. Without an action schema, `json` accepts any object.

    Raises:
        ConfigError: A template, pattern, schema or target of the block is invalid.
    """
    match config:
        case PythonAdapterConfig():
            return UserAdapter(config)
        case JsonAdapterConfig():
            return JsonAdapter(config, action_schema or {})
        case ToolAdapterConfig():
            return ToolAdapter(config)
    return TextAdapter(config)
