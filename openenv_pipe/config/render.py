"""Write a composed configuration as YAML with the origin of each block."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from openenv_pipe.config.compose import Composed, Origin
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import hide_assignments, hide_in_config, known_secrets
from openenv_pipe.system.files import dump_json
from openenv_pipe.system.resources import shipped_dir, short_path
from openenv_pipe.system.secrets import environment_secrets


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
    """Return the resolved configuration with a comment on each block's and value's origin.

    Secrets are replaced by their marks, as in all files.
    """
    parts = []
    values = composed.config.model_dump()
    for key, value in hide_in_config(values, known_secrets(values)).items():
        text = to_yaml({key: value})
        comment = f"# {_describe(composed.origins[key])}"
        if isinstance(value, dict):
            parts.append(f"\n{comment}\n{text}")
        else:
            parts.append(f"{text.rstrip()}  {comment}\n")
    return "".join(parts)


def as_json(config: RunConfig) -> str:
    """Return the resolved configuration as a run folder stores it."""
    values = config.model_dump(mode="json")
    return dump_json(hide_in_config(values, known_secrets(values)), sort_keys=False).rstrip()


def _describe(origin: Origin) -> str:
    return ", ".join(
        [*map(_where, origin.files), *(f"override {_one_line(text)}" for text in origin.overrides)]
    )


def _one_line(override: str) -> str:
    return " ".join(hide_assignments(override, environment_secrets()).split())


def _where(path: Path) -> str:
    shipped = shipped_dir("conf")
    if path.is_relative_to(shipped):
        return f"shipped {path.relative_to(shipped)}"
    return f"./{short_path(path)}"
