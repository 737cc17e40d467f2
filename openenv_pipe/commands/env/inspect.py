"""`openenv-pipe env inspect`: write the YAML block that fits a server's own description.

The published schemas decide the adapter: MCP tools take `tool`, an action of one text takes `text`,
any other `json`. Nothing is played. Whether a seed has an effect, what a success is, and what else
a model should be told is not published; such values are marked as guesses.
"""

import asyncio
import contextlib
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import yaml

from openenv_pipe.commands.env.targets import NO_BLOCK, Target, one_server
from openenv_pipe.config.compose import compose_env
from openenv_pipe.config.schema import EnvConfig, ServingConfig
from openenv_pipe.config.secrets import MARK, hide_in_config, known_secrets
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.adapters.json import without_metadata
from openenv_pipe.environments.adapters.schema_text import schema_text
from openenv_pipe.environments.client.metadata import (
    ANSWER_FIELD_NAMES,
    ServerMetadata,
    fetch_metadata,
)
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.pool import open_session
from openenv_pipe.environments.schemas import Schema, SchemaWalk
from openenv_pipe.errors import ConfigError, ServerFullError, SessionError
from openenv_pipe.system.resources import env_dirs, find_env, short_path

OWN_FIELDS = ("done", "reward", "metadata")  # OpenEnv's fields of every observation
TOOL_FIELDS = {"type", "tool_name", "arguments"}  # fields of an action that calls a tool
START_KEYS = (
    *("package", "python", "command", "variables"),
    *("reset_timeout_s", "step_timeout_s", "max_message_mb"),
)
ONE_SESSION = (
    "A server has one session. Several servers play episodes at the same time:\n"
    "host.sessions_per_server=1 host.num_servers=4"
)
SLOT_LIMIT_S = 2.0  # for a server to free the slot of a closed session
SLOT_POLL_S = 0.1
TOOL_SYSTEM = "Use the tools to do what you are asked."
# Only for actions with a schema; for plain text there is nothing to draw from.
BASELINES = "baselines: {random: openenv_pipe.environments.random_policy:random_action}\n"


def inspect_environment(target: Target, output: Path | None) -> str:
    """Return the env block for an environment as YAML; also write it to `output`.

    Raises:
        ConfigError: The target or its description is invalid, or `output` exists.
        HostError: The server does not start.
    """
    if output is not None and output.exists():
        raise ConfigError(f"{output} exists; name another file, or remove it")
    serving = target.serving
    description, has_one_session = asyncio.run(_ask(serving))
    notes = [_where(serving), ONE_SESSION if has_one_session else ""]
    text = env_block(description, serving.env, notes)
    _check(text, description)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    return text


def env_block(description: ServerMetadata, env: EnvConfig, notes: Sequence[str] = ()) -> str:
    """Return a file for `conf/env/` with a comment on each guessed value.

    The keys that start the server are taken from `env`; secrets become references to environment
    variables.
    """
    kind, adapter = adapter_block(description)
    override = "" if kind == "text" else f"  - override adapter: {kind}\n"
    form = schema_text(without_metadata(description.action))
    parts = [description.text, f"Its action:\n{form}" if kind != "tool" else "", *notes]
    about = "\n".join(filter(None, parts))
    name = Path(env.package).name if env.package else description.name or env.name
    head = {"name": re.sub(r"\W+", "_", name).lower(), **_start_of(env)}
    return (
        f"{_comment(about)}defaults:\n  - base\n{override}  - _self_\n\n"
        f"{_yaml(head)}"
        "success_reward: 1.0  # a guess: from this total on, an episode is a success\n"
        f"{BASELINES if kind != 'text' else ''}"
        f"{_yaml({'adapter': adapter}) if adapter else ''}"
        "tasks:  # a guess: task i is reset with seed seed_start + i\n"
        "  train: {num_tasks: 1000}\n"
        "  eval: {num_tasks: 100}\n"
    )


def _start_of(env: EnvConfig) -> dict[str, Any]:
    """Return the keys of the server's start that differ from `conf/env/base.yaml`."""
    usual = compose_env([*NO_BLOCK, "env.name=usual"]).env
    values = env.model_dump(include=set(START_KEYS))
    if env.package:
        values["package"] = _short_package(env.package)
    changed = {key: values[key] for key in START_KEYS if values[key] != getattr(usual, key)}
    return _with_references(hide_in_config(changed, known_secrets(changed)))


def _with_references(value: Any) -> Any:
    """Replace secrets by references to environment variables of the same names."""
    if isinstance(value, dict):
        return {key: _with_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_references(item) for item in value]
    return MARK.sub(r"${oc.env:\1}", value) if isinstance(value, str) else value


def _where(serving: ServingConfig) -> str:
    """Name the host overrides that training needs, if the block does not start the server."""
    host = serving.host
    match host.type:
        case "attach":
            return f"To use it where it runs: host=attach 'host.urls=[{','.join(host.urls)}]'"
        case "docker" if host.image:
            port = f" host.container_port={host.container_port}" if host.container_port else ""
            return f"To start it: host=docker host.image={host.image}{port}"
        case "kubernetes":
            return f"To start it: host=kubernetes host.image={host.image}"
    return ""


def adapter_block(description: ServerMetadata) -> tuple[str, dict[str, Any]]:
    """Return the adapter's type, and the keys that differ from `conf/env/adapter/<type>.yaml`."""
    schema = without_metadata(description.action)
    fields = schema.get("properties", {})
    if not fields or set(fields) == TOOL_FIELDS:
        return "tool", {"system": TOOL_SYSTEM}
    pattern = _pattern(schema)
    if pattern is None:
        return "json", {}
    keys = {
        "system": _request(schema),
        "first": _template(description.first_observation),
        "following": _template(description.observation),
        "pattern": pattern,
    }
    return "text", keys


def _request(schema: Schema) -> str:
    """Ask the model for an action that is one text."""
    ((name, field),) = schema["properties"].items()
    field = SchemaWalk(schema).resolved(field)
    told = " ".join(str(field.get("description", "")).split())
    choices = f": {', '.join(field['enum'])}" if "enum" in field else ""
    return f"Reply with the {name} and nothing else{choices}. {told}".strip()


def _pattern(schema: Schema) -> str | None:
    """Return the pattern of an action with a single text field; None for any other."""
    fields = schema.get("properties", {})
    if len(fields) != 1:
        return None
    ((name, field),) = fields.items()
    field = SchemaWalk(schema).resolved(field)
    if field.get("type") != "string" or not name.isidentifier():
        return None
    if "enum" in field:
        return rf"\b(?P<{name}>{'|'.join(map(re.escape, field['enum']))})\b"
    return rf"(?s)(?P<{name}>\S(?:.*\S)?)"


def _template(observation: Schema) -> str:
    """Return a template with a line for each field, or a single field alone.

    Fields whose names suggest that they contain the answer are left out.
    """
    fields = observation.get("properties", {})
    names = [name for name in fields if name not in OWN_FIELDS and name not in ANSWER_FIELD_NAMES]
    if len(names) == 1:
        return f"{{{{ {names[0]} }}}}"
    return "\n".join(f"{name}: {{{{ {name} }}}}" for name in names) or "{{ metadata }}"


def _short_package(package: str) -> str:
    """Return the name of a package in `envs/`, or its folder from here."""
    folder = find_env(package)
    if any(folder.parent == each.resolve() for each in env_dirs()):
        return folder.name
    path = short_path(folder)
    return path if path.startswith("/") else f"./{path}"


async def _ask(serving: ServingConfig) -> tuple[ServerMetadata, bool]:
    """Fetch the metadata, starting a server if none runs; True if it has only one session."""
    async with one_server(serving, num_sessions=serving.host.sessions_per_server) as host:
        description = await fetch_metadata(host.urls[0], host.access)
        return description, await _has_one_session(serving.env, host)


async def _has_one_session(env: EnvConfig, host: Host) -> bool:
    """True if a second session is refused beside the first. Other failures are not reported here,
    but by `env check`."""
    deadline_s = time.monotonic() + SLOT_LIMIT_S
    async with AsyncExitStack() as opened:
        for _ in range(2):
            while True:
                try:
                    session = await open_session(env, host.urls[0], host.access)
                    break
                except ServerFullError:  # The session that the start closed may still count.
                    if time.monotonic() > deadline_s:
                        return True
                except SessionError:
                    return False
                await asyncio.sleep(SLOT_POLL_S)
            opened.push_async_callback(session.close)
    return False


def _check(text: str, description: ServerMetadata) -> None:
    """Compose the block and build its adapter. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-inspect-") as folder:
        path = Path(folder) / "conf" / "env" / "inspected.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        with contextlib.chdir(folder):
            build_adapter(compose_env(["env=inspected"]).env.adapter, description.action)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, which people can edit."""


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
