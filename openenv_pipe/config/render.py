"""Write a composed configuration as YAML with the origin of each block."""

from pathlib import Path

import yaml

from openenv_pipe.config.compose import Composed, Origin
from openenv_pipe.system.resources import shipped_dir, short_path


class _Dumper(yaml.SafeDumper):
    """Keeps the schema's order, and writes text of several lines as a block."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _represent_text)


def as_yaml(composed: Composed) -> str:
    """Return the resolved configuration with a comment on each block's and value's origin."""
    parts = []
    for key, value in composed.config.model_dump().items():
        text = yaml.dump({key: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        comment = f"# {_describe(composed.origins[key])}"
        if isinstance(value, dict):
            parts.append(f"\n{comment}\n{text}")
        else:
            parts.append(f"{text.rstrip()}  {comment}\n")
    return "".join(parts)


def _describe(origin: Origin) -> str:
    return ", ".join(
        [*map(_where, origin.files), *(f"override {text}" for text in origin.overrides)]
    )


def _where(path: Path) -> str:
    shipped = shipped_dir("conf")
    if path.is_relative_to(shipped):
        return f"shipped {path.relative_to(shipped)}"
    return f"./{short_path(path)}"
