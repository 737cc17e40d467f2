"""Turn observations into chat messages, by Jinja templates or as compact JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openenv_pipe.config.schema import ExampleExchange
from openenv_pipe.environments.adapters.images import Notes
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.time_limit import run_limited
from openenv_pipe.types import Message, Observation

MAX_NAMED = 500  # characters
RENDER_LIMIT_S = 10.0  # of one message, which usually takes about a millisecond
EMPTY: tuple[object, ...] = (None, "", [], {})
BOOKKEEPING = frozenset(
    {"episode_id", "session_id", "request_id", "timestamp", "created_at", "step_count"}
)


def compile_template(key: str, source: str) -> jinja2.Template:
    """Compile the template of `env.adapter.<key>`; rendering an undefined name is an error.

    Raises ConfigError: The source is not a Jinja template.
    """
    try:
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        template = environment.from_string(source)
    except Exception as error:  # Jinja's own, and Python's, such as for too many nested loops
        raise ConfigError(
            f"env.adapter.{key} is not a Jinja template: {error} in {source!r:.500}"
        ) from None
    # Every rendering copies the globals, and Jinja's own ChainMap is slow to copy.
    template.globals = dict(template.globals)
    return template


def compile_optional(key: str, source: str | None) -> jinja2.Template | None:
    return None if source is None else compile_template(key, source)


def render_message(role: str, template: jinja2.Template, fields: Mapping[str, Any]) -> Message:
    """Render one message.

    Raises:
        ConfigError: The template fails or takes too long; the message names the fields that exist.
    """
    notes = Notes()
    try:
        text = run_limited(partial(template.render, notes.replace(fields)), RENDER_LIMIT_S)
    except jinja2.UndefinedError as error:
        raise ConfigError(
            f"an env.adapter template asks for a field that the observation lacks: "
            f"{error.message}; it has {_named(fields)}"
        ) from None
    except Exception as error:  # whatever an expression of the template raises
        raise ConfigError(
            f"an env.adapter template cannot be rendered: {error}; the fields that it can use are "
            f"{_named(fields)}"
        ) from None
    return _message(role, text, notes)


def example_messages(examples: Sequence[ExampleExchange]) -> list[Message]:
    """Return the exchanges that a model is shown before its first message."""
    return [
        {"role": role, "content": text}
        for example in examples
        for role, text in (("user", example.user), ("assistant", example.reply))
    ]


def _message(role: str, text: str, notes: Notes) -> Message:
    """Return a message; its `images` are those whose notes are in its text."""
    images = notes.shown_in(text)
    return {"role": role, "content": text} | ({"images": images} if images else {})


def _named(fields: Mapping[str, Any]) -> str:
    """List the names of the fields, shortened: a server may send thousands."""
    names = ", ".join(sorted(fields))
    return names if len(names) <= MAX_NAMED else f"{names[:MAX_NAMED]}..."


def observation_message(
    role: str,
    template: jinja2.Template | None,
    observation: Observation,
    plain: Callable[[Observation], str],
    **more: str,
) -> Message:
    """Render with the template, which also sees `more`; without a template, call `plain`."""
    if template is None:
        notes = Notes()
        return _message(role, plain(notes.replace(observation)), notes)
    return render_message(role, template, {**observation, **more})


def observation_text(observation: Observation) -> str:
    """Return the observation as compact JSON without empty fields and bookkeeping.

    The metadata is included only if there is nothing else.
    """
    told = _told(observation)
    metadata = told.pop("metadata", {})
    return compact_json(told or (_told(metadata) if isinstance(metadata, Mapping) else metadata))


def _told(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if value not in EMPTY and name not in BOOKKEEPING
    }


def compact_json(value: Any) -> str:
    """Return JSON without spaces and without escapes for letters beyond ASCII."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
