"""Adapter `json`: the model writes a JSON object, checked against the environment's schema."""

import random
from collections.abc import Sequence

import jinja2

from openenv_pipe.config.schema import JsonAdapterConfig
from openenv_pipe.environments.adapters.action_check import ActionCheck
from openenv_pipe.environments.adapters.base import STILL_THINKING, Ask, UnusableReply
from openenv_pipe.environments.adapters.schema_text import schema_text
from openenv_pipe.environments.adapters.templates import (
    compact_json,
    compile_optional,
    compile_template,
    example_messages,
    observation_message,
    observation_text,
    render_message,
)
from openenv_pipe.environments.random_values import draw_value
from openenv_pipe.environments.schemas import Schema, require_schema
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.replies.reader import as_reply
from openenv_pipe.types import Action, Message, Observation, Opening

MAX_EXAMPLE = 200  # characters


class JsonAdapter:
    """Reads an action from the last JSON object in a reply.

    Templates see the observation's fields and `action_schema`, the schema in a short form.
    """

    def __init__(self, config: JsonAdapterConfig, action_schema: Schema) -> None:
        """Raises ConfigError for an invalid template or schema."""
        self._system = compile_optional("system", config.system)
        self._examples = example_messages(config.examples)
        self._first = compile_optional("first", config.first)
        self._following = compile_optional("following", config.following)
        self._unusable = compile_template("unusable", config.unusable)
        require_schema(action_schema, "the environment's action schema")
        self._check = ActionCheck(without_metadata(action_schema))
        self._schema = without_fields(without_metadata(action_schema), config.hidden_fields)
        self._schema_text = schema_text(self._schema)
        self._example = _example(self._schema, self._check)

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        messages = [*self._examples, self._message("user", self._first, observation)]
        if self._system is not None:
            messages.insert(0, self._message("system", self._system, observation))
        return Opening(messages=messages, action_schema=self._schema)

    def read(self, reply: str) -> list[Action]:
        read = as_reply(reply)
        if not read.objects:
            why = STILL_THINKING if read.is_thinking else "there is no JSON object in the reply"
            raise UnusableReply(why + self._example)
        last = read.objects[-1]
        if last.value is None:
            raise UnusableReply(last.problem)
        if problems := self._check.problems(last.value):
            raise UnusableReply("; ".join(problems) + self._example)
        return [last.value]

    def follow(self, observation: Observation) -> list[Message]:
        return [self._message("user", self._following, observation)]

    def reject(self, why: str) -> list[Message]:
        fields = {"why": why, "action_schema": self._schema_text}
        return [render_message("user", self._unusable, fields)]

    def _message(
        self, role: str, template: jinja2.Template | None, observation: Observation
    ) -> Message:
        schema = self._schema_text
        return observation_message(
            role, template, observation, observation_text, action_schema=schema
        )


def without_metadata(schema: Schema) -> Schema:
    """Return the schema without `metadata`, which every OpenEnv action has and no model fills."""
    fields = schema.get("properties")
    if not isinstance(fields, dict) or "metadata" in schema.get("required", []):
        return schema
    own = {name: field for name, field in fields.items() if name != "metadata"}
    return {**schema, "properties": own}


def without_fields(schema: Schema, names: Sequence[str]) -> Schema:
    """Return the schema without the fields that a model is not told about.

    Raises ConfigError: The schema has no such field, or requires it.
    """
    fields = schema.get("properties")
    if not names or not isinstance(fields, dict):
        return schema
    required = schema.get("required", [])
    for name in names:
        if name not in fields or name in required:
            what = "is required by" if name in fields else "is no field of"
            optional = ", ".join(each for each in fields if each not in required) or "none"
            raise ConfigError(
                f"env.adapter.hidden_fields: {name!r} {what} the environment's action; its "
                f"optional fields are {optional}"
            )
    return {**schema, "properties": {each: fields[each] for each in fields if each not in names}}


def _example(schema: Schema, check: ActionCheck) -> str:
    """Return an example of a usable reply, to append to a rejection; empty if there is none."""
    if not schema.get("properties"):
        return ""
    try:
        action = draw_value(schema, random.Random(0), max_depth=0)
        if not isinstance(action, dict) or check.problems(action):
            return ""
    except (ConfigError, UnusableReply):
        return ""
    text = compact_json(action)
    return f"; for example {text}" if len(text) <= MAX_EXAMPLE else ""
