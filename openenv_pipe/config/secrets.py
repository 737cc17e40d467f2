"""Keep secrets out of run folders.

A secret is the value of an environment variable, or of a configuration key, whose name says so
(HF_TOKEN, api_key, Authorization, ...). All files have `<hidden: HF_TOKEN>` in its place; when a
configuration is read back, the environment variable of that name is inserted again.

Secrets under other names, and secrets of fewer than 8 characters inside of text, are not
recognised.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from openenv_pipe.errors import RunFolderError

SECRET_NAME = (
    r"[\w-]*(?:(?:api|access|private)[-_]?key|secret|token|passw(?:or)?d|credentials?"
    r"|authorization|cookie)"
)
SCHEME = r"(?:(?:Bearer|Basic)\s+)?"
# These values only say where the secret is; one with a default would contain the secret.
NO_SECRET = rf"""['"]?{SCHEME}(?:<hidden|\$\{{oc\.env:\w+\}}['"]?\s*(?:[,}}\]]|$))"""
SECRET_VALUE = (
    rf"""'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<plain>{SCHEME}(?:\$\{{[^}}]*\}}|[^\s,}}])+)"""
)
ASSIGNMENT = re.compile(
    rf"\b(?P<name>{SECRET_NAME})\s*[=:]\s*(?!{NO_SECRET})(?:{SECRET_VALUE})", re.IGNORECASE
)
MARK = re.compile(r"<hidden: ([^>]+)>")
MIN_SECRET_LENGTH = 8  # characters; shorter values would match by accident


def hide_secrets(text: str, secrets: Mapping[str, str]) -> str:
    """Replace each secret's value in `text` by its mark. `secrets` maps values to names."""
    for value in sorted(secrets, key=len, reverse=True):  # One secret may contain another.
        text = text.replace(value, f"<hidden: {secrets[value]}>")
    return text


def hide_assignments(text: str, secrets: Mapping[str, str]) -> str:
    """Hide secrets in command lines and overrides, where `api_key=...` also reveals one."""
    return ASSIGNMENT.sub(_hide_value, hide_secrets(text, secrets))


def assigned_secrets(text: str, secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return names and values of what `hide_assignments` hides because of the name alone."""
    found = ASSIGNMENT.finditer(hide_secrets(text, secrets))
    return [(each["name"], each[each.lastgroup or 0]) for each in found]


def hide_in_config(value: Any, secrets: Mapping[str, str], key: str = "") -> Any:
    """Copy a configuration's dump without the values of secret keys and known secrets."""
    if isinstance(value, Mapping):
        return {name: hide_in_config(item, secrets, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hide_in_config(item, secrets, key) for item in value]
    if not isinstance(value, str):
        return value
    hidden = hide_secrets(value, secrets)
    by_name = hidden == value and value and is_secret_name(key)
    return f"<hidden: {key}>" if by_name else hidden


def restore_in_config(value: Any) -> Any:
    """Undo `hide_in_config`.

    Raises:
        RunFolderError: An environment variable with a hidden value is not set.
    """
    if isinstance(value, Mapping):
        return {name: restore_in_config(item) for name, item in value.items()}
    if isinstance(value, list):
        return [restore_in_config(item) for item in value]
    return MARK.sub(_from_environment, value) if isinstance(value, str) else value


def unwritten_secrets(config: Any) -> dict[str, str]:
    """Return the secrets, by name, that `restore_in_config` would not find in the environment."""
    secrets = known_secrets(config)
    return {
        name: value
        for name, value in _named_strings(config)
        if name not in os.environ and hide_in_config(value, secrets, name) == f"<hidden: {name}>"
    }


def known_secrets(config: Any) -> dict[str, str]:
    """Map values to names of the secrets in a configuration's dump and in the environment.

    A secret that is in both, even as part of a configured value such as "Bearer ...", has the
    variable's name, because `restore_in_config` looks there.
    """
    ours = _long_secrets(os.environ.items())
    configured = _long_secrets(_named_strings(config))
    unknown = {value: name for value, name in configured.items() if not any(map(value.count, ours))}
    return unknown | ours


def is_secret_name(name: str) -> bool:
    """True if a variable or key of this name holds a secret."""
    return re.fullmatch(SECRET_NAME, name, re.IGNORECASE) is not None


def _long_secrets(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {
        value: name
        for name, value in named
        if is_secret_name(name) and len(value) >= MIN_SECRET_LENGTH
    }


def _named_strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _named_strings(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _named_strings(item, key)
    elif isinstance(value, str):
        yield key, value


def _hide_value(assignment: re.Match[str]) -> str:
    """Replace the value of an assignment by a mark; quotes stay, so that it can be restored."""
    start, end = assignment.span(assignment.lastgroup or 0)
    before = assignment.string[assignment.start() : start]
    after = assignment.string[end : assignment.end()]
    return f"{before}<hidden: {assignment['name']}>{after}"


def _from_environment(mark: re.Match[str]) -> str:
    name = mark.group(1)
    if name not in os.environ:
        raise RunFolderError(
            f"the value of {name} is a secret and was not written to the run folder; "
            f"set the environment variable {name} and run the command again"
        )
    return os.environ[name]
