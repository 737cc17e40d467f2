"""Adapter `json`: the environment's own schema says what to write, and judges what was written."""

from typing import Any

import jinja2
import jsonschema
import referencing

from openenv_pipe.config.schema import JsonAdapterConfig
from openenv_pipe.environments.adapters.base import Ask, UnusableReply
from openenv_pipe.environments.adapters.reply_json import answer_of, find_objects
from openenv_pipe.environments.adapters.schema_text import Schema, schema_text
from openenv_pipe.environments.adapters.templates import (
    compile_optional,
    compile_template,
    observation_message,
    observation_text,
    render_message,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Action, Message, Observation, Opening

MOST_PROBLEMS = 3  # told at once
LONGEST_PROBLEM = 200  # characters; a validator repeats the value that it refuses


class JsonAdapter:
    """Templates see the observation's fields and `action_schema`, the schema in a short form.

    Of several objects in a reply the last one counts.
    """

    def __init__(self, config: JsonAdapterConfig, action_schema: Schema) -> None:
        """Raises ConfigError for a template or a schema that is none."""
        self._system = compile_optional("system", config.system)
        self._first = compile_optional("first", config.first)
        self._following = compile_optional("following", config.following)
        self._unusable = compile_template("unusable", config.unusable)
        self._schema = without_metadata(action_schema)
        self._schema_text = schema_text(self._schema)
        self._validator = _validator(self._schema)

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        messages = [self._message("user", self._first, observation)]
        if self._system is not None:
            messages.insert(0, self._message("system", self._system, observation))
        return Opening(messages=messages, action_schema=self._schema)

    def read(self, reply: str) -> list[Action]:
        objects = find_objects(answer_of(reply))
        if not objects:
            raise UnusableReply("there is no JSON object in the reply")
        if problems := self._problems(objects[-1]):
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

    def _problems(self, action: dict[str, Any]) -> list[str]:
        """What the schema has against an action, each with the field that it is about."""
        problems = []
        try:
            for error in self._validator.iter_errors(action):
                error = jsonschema.exceptions.best_match([error])
                field = ".".join(map(str, error.absolute_path))
                problem = f"{field}: {error.message}" if field else error.message
                problems.append(_cut(problem))
                if len(problems) == MOST_PROBLEMS:
                    break
        except referencing.exceptions.Unresolvable as error:
            raise ConfigError(
                f"the environment's action schema refers to nothing: {error}"
            ) from None
        return problems


def without_metadata(schema: Schema) -> Schema:
    """The schema without the field that every OpenEnv action has, and no model has to fill."""
    fields = schema.get("properties")
    if not isinstance(fields, dict) or "metadata" in schema.get("required", []):
        return schema
    own = {name: field for name, field in fields.items() if name != "metadata"}
    return {**schema, "properties": own}


def _validator(schema: Schema) -> Any:
    """A validator that looks nothing up outside of the schema."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(
            f"the environment's action schema is no JSON Schema: {error.message}; mend the "
            "environment, or use env.adapter.type=text or python"
        ) from None
    return kind(schema, registry=referencing.Registry())


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_PROBLEM else f"{text[:LONGEST_PROBLEM]}..."
