"""The adapter's type and keys that `env inspect` writes, from the schemas and a trial."""

import re
from collections.abc import Sequence
from typing import Any

from openenv_pipe.environments.adapters.json import without_metadata
from openenv_pipe.environments.adapters.schema_text import description_of
from openenv_pipe.environments.client.metadata import ServerMetadata
from openenv_pipe.environments.schemas import Schema, SchemaWalk
from openenv_pipe.extras.lab.chat_prompts import TOOL_SYSTEM, ChatPrompts
from openenv_pipe.extras.lab.random_play import calls_tools
from openenv_pipe.extras.lab.templates import (
    first_template,
    following_template,
    is_plain,
    literal,
    template_of_schema,
)
from openenv_pipe.extras.lab.trial import Trial


def adapter_block(
    description: ServerMetadata,
    trial: Trial | None = None,
    prompts: ChatPrompts | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return the adapter's type, and the keys that differ from `conf/env/adapter/<type>.yaml`."""
    schema = without_metadata(description.action)
    if not schema.get("properties") or calls_tools(schema):
        return "tool", {"system": prompts.system("tool", description) if prompts else TOOL_SYSTEM}
    templates = {
        "first": template_of_schema(description.first_observation),
        "following": template_of_schema(description.observation),
    }
    episodes = [play.observations for play in trial.plays] if trial else []
    if trial is not None:
        templates["first"] = first_template(trial.firsts)
    if any(len(episode) > 1 for episode in episodes):
        templates["following"] = following_template(episodes)
    pattern = _pattern(schema, prompts.moves if prompts else ())
    kind = "json" if pattern is None else "text"
    if pattern is None and is_plain(episodes):
        templates = {}
    told: dict[str, Any] = {}
    if prompts is not None:
        told["system"] = prompts.system(kind, description)
        told["examples"] = prompts.exchanges(kind, templates)
    if pattern is None:
        return kind, told | templates
    return kind, {"system": _request(schema), **told, **templates, "pattern": pattern}


def _request(schema: Schema) -> str:
    ((name, field),) = schema["properties"].items()
    field = SchemaWalk(schema).resolved(field)
    choices = f": {', '.join(field['enum'])}" if "enum" in field else ""
    reply = f"Reply with the {name} and nothing else{choices}."
    return literal(" ".join(filter(None, (description_of(schema), reply, description_of(field)))))


def _pattern(schema: Schema, moves: Sequence[str]) -> str | None:
    """Return the pattern of an action with a single text field; None for any other.

    moves: the only legal values of the field, where its schema lists none.
    """
    fields = schema.get("properties", {})
    if len(fields) != 1:
        return None
    ((name, field),) = fields.items()
    field = SchemaWalk(schema).resolved(field)
    choices = field.get("enum", [""])
    if field.get("type") != "string" or not name.isidentifier() or not choices:
        return None
    if not all(isinstance(choice, str) and choice.isprintable() for choice in choices):
        return None
    if "enum" not in field:
        # The longest first, because one may begin with another.
        choices = sorted(moves, key=len, reverse=True)
    if choices:
        return rf"\b(?P<{name}>{'|'.join(map(re.escape, choices))})\b"
    return rf"(?s)(?P<{name}>\S(?:.*\S)?)"
