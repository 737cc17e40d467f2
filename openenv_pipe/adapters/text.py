"""Adapter `text`: Jinja templates one way, a regular expression the other."""

import re

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openenv_pipe.adapters.base import UnusableReply
from openenv_pipe.config.schema import TextAdapterConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Action, Message, Observation


class TextAdapter:
    """Templates see the observation's fields as variables; an undefined one is an error."""

    def __init__(self, config: TextAdapterConfig) -> None:
        self._system = _template("system", config.system) if config.system else None
        self._first = _template("first", config.first)
        self._following = _template("following", config.following)
        self._unusable = _template("unusable", config.unusable)
        self._pattern = _pattern(config.pattern)

    def open(self, observation: Observation) -> list[Message]:
        messages = [_message("user", self._first, observation)]
        if self._system is not None:
            messages.insert(0, _message("system", self._system, observation))
        return messages

    def read(self, reply: str) -> Action:
        match = self._pattern.search(reply)
        if match is None:
            raise UnusableReply(f"the reply does not match {self._pattern.pattern}")
        return {name: text for name, text in match.groupdict().items() if text is not None}

    def follow(self, observation: Observation) -> list[Message]:
        return [_message("user", self._following, observation)]

    def refuse(self, why: str) -> list[Message]:
        return [_message("user", self._unusable, {"why": why})]


def _template(key: str, source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"env.adapter.{key} is not a Jinja template: {error.message} in {source!r}"
        ) from None


def _pattern(source: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(source)
    except re.error as error:
        raise ConfigError(f"env.adapter.pattern={source!r} is not a regex: {error}") from None
    if not pattern.groupindex:
        raise ConfigError(
            f"env.adapter.pattern={source!r} has no named group; name the action's fields in it, "
            "for example (?P<message>.+)"
        )
    return pattern


def _message(role: str, template: jinja2.Template, fields: Observation) -> Message:
    try:
        return {"role": role, "content": template.render(fields)}
    except jinja2.UndefinedError as error:
        raise ConfigError(
            f"an env.adapter template asks for a field that the observation lacks: "
            f"{error.message}; it has {', '.join(sorted(fields))}"
        ) from None
    except (jinja2.TemplateRuntimeError, TypeError) as error:
        raise ConfigError(
            f"an env.adapter template cannot be rendered: {error}; "
            f"the fields are {', '.join(sorted(fields))}"
        ) from None
