"""Write a composed configuration as YAML with the origin of each key."""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from openenv_pipe.config.compose import Composed
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import hide_assignments, hide_in_config, known_secrets
from openenv_pipe.config.unused_keys import unused_keys
from openenv_pipe.system.files import dump_json
from openenv_pipe.system.resources import shipped_dir, short_path
from openenv_pipe.system.secrets import environment_secrets

INDENT = "  "


class _Dumper(yaml.SafeDumper):
    """Keeps the schema's order, and writes text of several lines as a block."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _represent_text)


def to_yaml(values: Mapping[str, Any], width: int | None = None) -> str:
    """Return values as YAML in their order. width: where lines are wrapped; None: PyYAML's 80."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def as_yaml(composed: Composed) -> str:
    """Return the resolved configuration with a comment on the origin of each key.

    It begins with comments on keys that have no effect.

    Secrets are replaced by their marks, as in all files.
    """
    values = composed.config.model_dump()
    hidden = hide_in_config(values, known_secrets(values))
    unused = "".join(f"# {text}\n" for text in unused_keys(composed))
    return unused + "".join(_lines(hidden, composed.origins, ""))


def _lines(
    values: Mapping[str, Any], origins: Mapping[str, Path | str], above: str
) -> Iterator[str]:
    """Yield YAML, a line or more for each key of a block. above: the block's key and a dot."""
    indent = INDENT * above.count(".")
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value:
            title = to_yaml({name: None}).removesuffix(" null\n")
            yield f"{indent}{title}\n" if above else f"\n{title}\n"
            yield from _lines(value, origins, f"{key}.")
            continue
        text = textwrap.indent(to_yaml({name: value}), indent)
        origin = origins.get(key)
        comment = f"# {_describe(origin)}" if origin is not None else ""
        if text.count("\n") > 1 and comment:  # a comment within a text would be part of it
            yield f"{indent}{comment}\n{text}"
        else:
            yield f"{text.rstrip()}  {comment}".rstrip() + "\n"


def as_json(config: RunConfig) -> str:
    """Return the resolved configuration as a run folder stores it."""
    values = config.model_dump(mode="json")
    return dump_json(hide_in_config(values, known_secrets(values)), sort_keys=False).rstrip()


def _describe(origin: Path | str) -> str:
    if isinstance(origin, str):
        return f"override {' '.join(hide_assignments(origin, environment_secrets()).split())}"
    shipped = shipped_dir("conf")
    if origin.is_relative_to(shipped):
        return f"shipped {origin.relative_to(shipped)}"
    return f"./{short_path(origin)}"
