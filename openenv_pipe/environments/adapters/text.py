"""Adapter `text`: observations through Jinja templates, actions by a regular expression."""

from collections.abc import Mapping
from typing import Any

from openenv_pipe.config.schema import TextAdapterConfig
from openenv_pipe.environments.adapters.base import Ask, UnusableReply
from openenv_pipe.environments.adapters.pattern_example import example_of
from openenv_pipe.environments.adapters.templates import (
    compile_optional,
    compile_template,
    example_messages,
    render_message,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.replies.reply import Reply
from openenv_pipe.system.patterns import LimitedPattern, SlowPatternError
from openenv_pipe.types import Action, Message, Observation, Opening


class TextAdapter:
    """Actions are the named groups of a regular expression; templates see the observation."""

    def __init__(self, config: TextAdapterConfig) -> None:
        self._system = compile_optional("system", config.system or None)
        self._examples = example_messages(config.examples)
        self._first = compile_template("first", config.first)
        self._following = compile_template("following", config.following)
        self._unusable = compile_template("unusable", config.unusable)
        self._pattern = _pattern(config.pattern)
        self._expected = _expected(self._pattern)

    def reject_unknown_fields(self, action_schema: Mapping[str, Any]) -> None:
        """Raise ConfigError if the pattern has a named group that is not a field of the action."""
        if action_schema.get("additionalProperties") is not False:
            return
        fields = action_schema.get("properties", {})
        unknown = [name for name in self._pattern.groups if name not in fields]
        if unknown:
            known = ", ".join(name for name in fields if name != "metadata") or "none"
            raise ConfigError(
                f"env.adapter.pattern={self._pattern.source!r} has the group {unknown[0]!r}, "
                f"which is not a field of the environment's action; its fields: {known}"
            )

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        messages = [*self._examples, render_message("user", self._first, observation)]
        if self._system is not None:
            messages.insert(0, render_message("system", self._system, observation))
        return Opening(messages=messages)

    def read(self, reply: str) -> list[Action]:
        try:
            # The marks and the thoughts of channels are left out, as of gpt-oss.
            match = self._pattern.search(reply.visible if isinstance(reply, Reply) else reply)
        except SlowPatternError as error:
            raise UnusableReply(str(error)) from None
        if match is None:
            raise UnusableReply(self._expected)
        return [{name: text for name, text in match.groupdict().items() if text is not None}]

    def follow(self, observation: Observation) -> list[Message]:
        return [render_message("user", self._following, observation)]

    def reject(self, why: str) -> list[Message]:
        return [render_message("user", self._unusable, {"why": why})]


def _expected(pattern: LimitedPattern) -> str:
    """Return what a model is told about a reply that does not match."""
    if (example := example_of(pattern)) is None:
        return f"the reply does not match {pattern.source}"
    return f"the reply does not have the expected form; a usable one is, for example, {example!r}"


def _pattern(source: str) -> LimitedPattern:
    try:
        pattern = LimitedPattern(source)
    except ValueError as error:
        raise ConfigError(f"env.adapter.pattern={source!r} is not a regex: {error}") from None
    if not pattern.groups:
        raise ConfigError(
            f"env.adapter.pattern={source!r} has no named group; name the action's fields in it, "
            "for example (?P<message>.+)"
        )
    return pattern
