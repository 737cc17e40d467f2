"""Turn observations into chat messages, by Jinja templates or as compact JSON."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openenv_pipe.environments.adapters.pictures import Notes
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Message, Observation

MAX_NAMED = 500  # characters
MAX_RANGE = 1_000_000  # numbers, of all calls of `range` in one rendering
MAX_TEXT = 10_000_000  # characters of a message, and elements of a product such as 'x' * 10
MAX_BITS = 10_000  # of a whole number
EMPTY: tuple[object, ...] = (None, "", [], {})
BOOKKEEPING = frozenset(
    {"episode_id", "session_id", "request_id", "timestamp", "created_at", "step_count"}
)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with limits for numbers, products and the rendered text.

    Without them, `{{ 9**(9**9) }}` computes for hours in one call, which not even Ctrl-C ends.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply `*` or `**`. Raises ValueError if the result would be too large."""
        sequence, factor = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * right if operator == "**" else bits + right.bit_length()
            if bits > MAX_BITS:
                raise ValueError(f"the result of {operator} has more than {MAX_BITS} bits")
        elif (
            operator == "*"
            and isinstance(sequence, str | list | tuple)
            and isinstance(factor, int)
            and len(sequence) * factor > MAX_TEXT
        ):
            raise ValueError(f"the result of * has more than {MAX_TEXT} elements")
        return super().call_binop(context, operator, left, right)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the pieces of a rendered text. Raises ValueError if the text is too long."""
        kept: list[str] = []
        size = 0
        for piece in pieces:
            kept.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise ValueError(f"the text has more than {MAX_TEXT} characters")
        return "".join(kept)


class _Range:
    """The `range` of one rendering, also of loops within loops."""

    def __init__(self) -> None:
        self._left = MAX_RANGE

    def __call__(self, *bounds: int) -> range:
        """Return a range. Raises ValueError if this rendering has asked for too many numbers."""
        numbers = range(*bounds)
        self._left -= len(numbers)
        if self._left < 0:
            raise ValueError(f"its ranges have more than {MAX_RANGE} numbers")
        return numbers


def compile_template(key: str, source: str) -> jinja2.Template:
    """Compile the template of `env.adapter.<key>`; rendering an undefined name is an error.

    Raises:
        ConfigError: The source is not a Jinja template.
    """
    environment = _BoundedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        template = environment.from_string(source)
    except Exception as error:  # Jinja's own, and Python's, such as for too many nested loops
        raise ConfigError(
            f"env.adapter.{key} is not a Jinja template: {error} in {source!r:.500}"
        ) from None
    # Every rendering copies the globals, and Jinja's own ChainMap is slow to copy.
    template.globals = dict(template.globals)
    return template


def compile_optional(key: str, source: str | None) -> jinja2.Template | None:
    """Compile a template that may be null."""
    return None if source is None else compile_template(key, source)


def render_message(role: str, template: jinja2.Template, fields: Mapping[str, Any]) -> Message:
    """Render one message.

    Raises:
        ConfigError: The template fails; the message names the fields that exist.
    """
    notes = Notes()
    try:
        text = template.render({"range": _Range(), **notes.replace(fields)})
    except jinja2.UndefinedError as error:
        raise ConfigError(
            f"an env.adapter template asks for a field that the observation lacks: "
            f"{error.message}; it has {_named(fields)}"
        ) from None
    except Exception as error:  # whatever an expression of the template raises
        raise ConfigError(
            f"an env.adapter template cannot be rendered: {error}; the fields are {_named(fields)}"
        ) from None
    return _message(role, text, notes)


def _message(role: str, text: str, notes: Notes) -> Message:
    """Return a message, with the pictures that its text has notes of as `pictures`."""
    pictures = notes.shown_in(text)
    return {"role": role, "content": text} | ({"pictures": pictures} if pictures else {})


def _named(fields: Mapping[str, Any]) -> str:
    """Name the fields, of which a server may send thousands."""
    names = ", ".join(sorted(fields))
    return names if len(names) <= MAX_NAMED else f"{names[:MAX_NAMED]}..."


def observation_message(
    role: str,
    template: jinja2.Template | None,
    observation: Observation,
    plain: Callable[[Observation], str],
    **more: str,
) -> Message:
    """Render by the template, which also sees `more`; without a template, call `plain`."""
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
