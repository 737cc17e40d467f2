"""Adapters translate observations to chat messages, and replies to actions."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from openenv_pipe.registry import if_command
from openenv_pipe.system.http import OPEN, Access
from openenv_pipe.types import Action, Message, Observation

__all__ = ["Adapter", "UnusableReply", "adapter_for", "build_adapter", "opening_messages"]


async def adapter_for(config: AdapterConfig, urls: Sequence[str], access: Access = OPEN) -> Adapter:
    """Build the adapter of a config block for the environment served at `urls`.

    Raises ConfigError: The block is invalid or does not fit the server's action, or the adapter
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

    Raises ConfigError: A template, pattern, schema or target of the block is invalid.
    """
    match config:
        case PythonAdapterConfig():
            return UserAdapter(config)
        case JsonAdapterConfig():
            return JsonAdapter(config, action_schema or {})
        case ToolAdapterConfig():
            return ToolAdapter(config)
    return TextAdapter(config)


def opening_messages(config: AdapterConfig, observation: Observation) -> list[Message]:
    """Return the first messages of an episode that begins with this observation, without a server.

    It works in any thread and inside a running event loop.

    Raises ConfigError: The block is invalid, its templates need another field, or its adapter needs
    the schema or the tools of a server.
    """

    async def ask(action: Action) -> Observation:
        raise _needs_server(config)

    if isinstance(config, JsonAdapterConfig):
        raise _needs_server(config)
    adapter = build_adapter(config)
    with ThreadPoolExecutor(1) as executor:
        opening = executor.submit(lambda: asyncio.run(adapter.open(observation, ask))).result()
    if opening.tools:
        raise _needs_server(config)
    return list(opening.messages)


def _needs_server(config: AdapterConfig) -> ConfigError:
    view = "; `openenv-pipe view` plays a checkpoint in its environment"
    return ConfigError(
        f"env.adapter.type={config.type} builds its first messages from what the environment's "
        f"server says, such as its tools{if_command('view', view)}"
    )
