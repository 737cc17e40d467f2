"""Adapter `json`: the model writes a JSON object, checked against the environment's schema."""

import jinja2

from openenv_pipe.config.schema import JsonAdapterConfig
from openenv_pipe.environments.adapters.action_check import ActionCheck
from openenv_pipe.environments.adapters.base import Ask, UnusableReply
from openenv_pipe.environments.adapters.reply_json import find_objects, without_thoughts
from openenv_pipe.environments.adapters.schema_text import schema_text
from openenv_pipe.environments.adapters.templates import (
    compile_optional,
    compile_template,
    observation_message,
    observation_text,
    render_message,
)
from openenv_pipe.environments.schemas import Schema, require_schema
from openenv_pipe.types import Action, Message, Observation, Opening


class JsonAdapter:
    """Replies with a JSON object as actions; the last object of a reply counts.

    Templates see the observation's fields and `action_schema`, the schema in a short form.
    """

    def __init__(self, config: JsonAdapterConfig, action_schema: Schema) -> None:
        """Raises ConfigError for an invalid template or schema."""
        self._system = compile_optional("system", config.system)
        self._first = compile_optional("first", config.first)
        self._following = compile_optional("following", config.following)
        self._unusable = compile_template("unusable", config.unusable)
        require_schema(action_schema, "the environment's action schema")
        self._schema = without_metadata(action_schema)
        self._check = ActionCheck(self._schema)
        self._schema_text = schema_text(self._schema)

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        messages = [self._message("user", self._first, observation)]
        if self._system is not None:
            messages.insert(0, self._message("system", self._system, observation))
        return Opening(messages=messages, action_schema=self._schema)

    def read(self, reply: str) -> list[Action]:
        objects = find_objects(without_thoughts(reply))
        if not objects:
            raise UnusableReply("there is no JSON object in the reply")
        if problems := self._check.problems(objects[-1]):
            raise UnusableReply("; ".join(problems))
        return [objects[-1]]

    def follow(self, observation: Observation) -> list[Message]:
        return [self._message("user", self._following, observation)]

    def refuse(self, why: str) -> list[Message]:
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
