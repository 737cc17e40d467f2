"""`openenv-pipe env inspect`: from what an environment says of itself to the YAML block that fits.

What the server publishes decides the adapter: MCP tools take `tool`, an action of one text takes
`text`, any other `json`. Refused here: playing. Whether a seed is honoured, what a success is, and
what else a model should be told, no server says; those values are guesses and marked as such.
"""

import asyncio
import contextlib
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml

from openenv_pipe.adapters import build_adapter
from openenv_pipe.adapters.json import without_metadata
from openenv_pipe.adapters.schema_text import Schema, resolved, schema_text
from openenv_pipe.config.compose import compose_env
from openenv_pipe.config.schema import EnvConfig, ServingConfig
from openenv_pipe.description import Description, describe
from openenv_pipe.errors import ConfigError
from openenv_pipe.resources import env_dirs, find_env, short_path
from openenv_pipe.targets import Target, one_server

OWN_FIELDS = ("done", "reward", "metadata")  # of every observation
TOOL_FIELDS = {"type", "tool_name", "arguments"}  # of an action that calls a tool
TOOL_SYSTEM = "Use the tools to do what you are asked."


def inspect_environment(target: Target, output: Path | None) -> str:
    """The env block for an environment, as YAML; also written to `output`.

    Raises ConfigError, and HostError if it does not start.
    """
    if output is not None and output.exists():
        raise ConfigError(f"{output} exists; name another file, or remove it")
    description = asyncio.run(_ask(target.serving))
    text = env_block(description, target.serving.env)
    _check(text, description)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    return text


def env_block(description: Description, env: EnvConfig) -> str:
    """A file for `conf/env/`, with a comment on each value that is a guess.

    Of `env` is taken what starts the server.
    """
    kind, adapter = adapter_block(description)
    override = "" if kind == "text" else f"  - override adapter: {kind}\n"
    form = schema_text(without_metadata(description.action))
    story = f"{description.text}\nIts action:\n{form}" if kind != "tool" else description.text
    name = Path(env.package).name if env.package else description.name or env.name
    head: dict[str, Any] = {"name": re.sub(r"\W+", "_", name).lower()}
    if env.package:
        head["package"] = _short_package(env.package)
    if env.command:
        head["command"] = env.command
    return (
        f"{_comment(story)}defaults:\n  - base\n{override}  - _self_\n\n"
        f"{_yaml(head)}"
        "success_reward: 1.0  # a guess: from this total on, an episode is a success\n"
        f"{_yaml({'adapter': adapter}) if adapter else ''}"
        "tasks:  # a guess: task i is reset with seed seed_start + i\n"
        "  train: {num_tasks: 1000}\n"
        "  eval: {num_tasks: 100}\n"
    )


def adapter_block(description: Description) -> tuple[str, dict[str, Any]]:
    """The adapter's type, and the keys in which it differs from `conf/env/adapter/<type>.yaml`."""
    schema = without_metadata(description.action)
    fields = schema.get("properties", {})
    if not fields or set(fields) == TOOL_FIELDS:
        return "tool", {"system": TOOL_SYSTEM}
    pattern = _pattern(schema)
    if pattern is None:
        return "json", {}
    templates = {
        "first": _template(description.first_observation),
        "following": _template(description.observation),
    }
    return "text", {**templates, "pattern": pattern}


def _pattern(schema: Schema) -> str | None:
    """The pattern of an action with one field, a text; None for any other."""
    fields = schema.get("properties", {})
    if len(fields) != 1:
        return None
    ((name, field),) = fields.items()
    field = resolved(field, schema)
    if field.get("type") != "string" or not name.isidentifier():
        return None
    if "enum" in field:
        return rf"\b(?P<{name}>{'|'.join(map(re.escape, field['enum']))})\b"
    return rf"(?s)(?P<{name}>\S.*)"


def _template(observation: Schema) -> str:
    """A line for each field, for people to take from; one field stands alone."""
    names = [name for name in observation.get("properties", {}) if name not in OWN_FIELDS]
    if len(names) == 1:
        return f"{{{{ {names[0]} }}}}"
    return "\n".join(f"{name}: {{{{ {name} }}}}" for name in names) or "{{ metadata }}"


def _short_package(package: str) -> str:
    """As a person would write it: the name of one in `envs/`, or its folder from here."""
    folder = find_env(package)
    if any(folder.parent == each.resolve() for each in env_dirs()):
        return folder.name
    path = short_path(folder)
    return path if path.startswith("/") else f"./{path}"


async def _ask(serving: ServingConfig) -> Description:
    """Starts one server for a moment, where it is not running yet."""
    async with one_server(serving) as host:
        return await describe(host.urls[0], host.access)


def _check(text: str, description: Description) -> None:
    """Composes the block and builds its adapter. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-inspect-") as folder:
        path = Path(folder) / "conf" / "env" / "inspected.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        with contextlib.chdir(folder):
            build_adapter(compose_env(["env=inspected"]).env.adapter, description.action)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, which people can edit."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def _yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _comment(text: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text.strip().splitlines())
