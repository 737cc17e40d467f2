"""Adapter `python`: a user's adapter, called as user code, with its answers checked."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from openenv_pipe.config.schema import PythonAdapterConfig
from openenv_pipe.environments.adapters.base import Adapter, Ask, UnusableReply
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.system.copies import copied
from openenv_pipe.system.python_targets import build_part
from openenv_pipe.system.user_code import UserCode
from openenv_pipe.system.user_numbers import shown
from openenv_pipe.types import Action, Message, Observation, Opening


class UserAdapter:
    """An `Adapter` that calls the methods of a user's adapter in a thread of their own."""

    def __init__(self, config: PythonAdapterConfig) -> None:
        """Raises ConfigError if the target cannot be used."""
        self._adapter = build_part("env.adapter", config, Adapter)
        self._name = f"env.adapter.target={config.target!r}"
        self._code = UserCode(self._name, passed=(PipeError, UnusableReply))

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        loop = asyncio.get_running_loop()

        async def ask_from_thread(action: Action) -> Observation:
            """Ask on the run's event loop, where the session is."""
            asking = asyncio.run_coroutine_threadsafe(_answer(ask, copied(action)), loop)
            return await asyncio.wrap_future(asking)

        opening = await self._code.call(self._adapter.open, observation, ask_from_thread)
        if not isinstance(opening, Opening):
            self._reject("open", opening, "an openenv_pipe.types.Opening")
        self._check_messages("open", opening.messages)
        if not _are_mappings(opening.tools) or not isinstance(opening.action_schema, Mapping):
            self._reject("open", opening, "tools and an action_schema that are JSON objects")
        return opening

    async def read(self, reply: str) -> Sequence[Action]:
        try:
            return self._check_actions(await self._code.call(self._adapter.read, reply))
        except UnusableReply as unusable:
            actions = self._check_actions(copied(unusable.actions))
            raise UnusableReply(str(unusable), actions) from None

    async def follow(self, observation: Observation) -> list[Message]:
        messages = await self._code.call(self._adapter.follow, observation)
        return self._check_messages("follow", messages)

    async def reject(self, why: str) -> list[Message]:
        messages = await self._code.call(self._adapter.reject, why)
        return self._check_messages("reject", messages)

    def _check_actions(self, actions: Any) -> Sequence[Action]:
        if not _are_mappings(actions):
            self._reject("read", actions, "a list of actions, each a dict with text as keys")
        return list(actions)

    def _check_messages(self, method: str, messages: Any) -> list[Message]:
        if not _are_mappings(messages) or not all(
            isinstance(message.get(key), str) for message in messages for key in ("role", "content")
        ):
            self._reject(method, messages, 'a list of messages, {"role": text, "content": text}')
        return list(messages)

    def _reject(self, method: str, returned: Any, expected: str) -> NoReturn:
        raise ConfigError(f"{self._name}: {method} returned {shown(returned)}; expected {expected}")


async def _answer(ask: Ask, action: Action) -> Observation:
    return await ask(action)


def _are_mappings(value: Any) -> bool:
    """Return whether a value is a list or a tuple of dicts whose keys are texts."""
    return isinstance(value, list | tuple) and all(
        isinstance(each, Mapping) and all(isinstance(key, str) for key in each) for each in value
    )
