"""Keeps secrets out of run folders.

A secret is the value of an environment variable, or of a configuration key, whose name says so
(HF_TOKEN, api_key, Authorization, ...). In everything written its place is taken by
`<hidden: HF_TOKEN>`; reading a configuration back puts the value of the environment variable of
that name in again.

It refuses to guess: a secret under a harmless name, or of fewer than 8 characters in running
text, is not recognised.
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
# Such a value says where the secret is, not what it is; a default in it would say that.
NO_SECRET = rf"""['"]?{SCHEME}(?:<hidden|\$\{{oc\.env:\w+\}}['"]?\s*(?:[,}}\]]|$))"""
SECRET_VALUE = (
    rf"""'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<plain>{SCHEME}(?:\$\{{[^}}]*\}}|[^\s,}}])+)"""
)
ASSIGNMENT = re.compile(
    rf"\b(?P<name>{SECRET_NAME})\s*[=:]\s*(?!{NO_SECRET})(?:{SECRET_VALUE})", re.IGNORECASE
)
MARK = re.compile(r"<hidden: ([^>]+)>")
SHORTEST_SECRET = 8  # characters; shorter values would be found by accident


def hide_secrets(text: str, secrets: Mapping[str, str]) -> str:
    """Replace each secret's value in `text` by its mark. `secrets` maps values to names."""
    for value in sorted(secrets, key=len, reverse=True):  # one secret may contain another
        text = text.replace(value, f"<hidden: {secrets[value]}>")
    return text


def hide_assignments(text: str, secrets: Mapping[str, str]) -> str:
    """`hide_secrets` for command lines and overrides, where `api_key=...` tells by its name."""
    return ASSIGNMENT.sub(_hide_value, hide_secrets(text, secrets))


def assigned_secrets(text: str, secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names and values of what `hide_assignments` hides by the name alone."""
    found = ASSIGNMENT.finditer(hide_secrets(text, secrets))
    return [(each["name"], each[each.lastgroup or 0]) for each in found]


def hide_in_config(value: Any, secrets: Mapping[str, str], key: str = "") -> Any:
    """A copy of a configuration's dump without the values of secret keys and known secrets."""
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
    """The inverse of `hide_in_config`; raises RunFolderError for a variable that is not set."""
    if isinstance(value, Mapping):
        return {name: restore_in_config(item) for name, item in value.items()}
    if isinstance(value, list):
        return [restore_in_config(item) for item in value]
    return MARK.sub(_from_environment, value) if isinstance(value, str) else value


def unwritten_secrets(config: Any) -> dict[str, str]:
    """What `restore_in_config` would miss in this process's environment, by name."""
    secrets = known_secrets(config)
    return {
        name: value
        for name, value in _named_strings(config)
        if name not in os.environ and hide_in_config(value, secrets, name) == f"<hidden: {name}>"
    }


def known_secrets(config: Any) -> dict[str, str]:
    """Values to names of the secrets in a configuration's dump and in this process's environment.

    What is in both goes by the variable's name, also as a part of a configured value such as
    "Bearer ...": that is where it can be had again.
    """
    ours = _long_secrets(os.environ.items())
    configured = _long_secrets(_named_strings(config))
    unknown = {value: name for value, name in configured.items() if not any(map(value.count, ours))}
    return unknown | ours


def is_secret_name(name: str) -> bool:
    """True for the name of a variable or key that holds a secret."""
    return re.fullmatch(SECRET_NAME, name, re.IGNORECASE) is not None


def _long_secrets(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {
        value: name
        for name, value in named
        if is_secret_name(name) and len(value) >= SHORTEST_SECRET
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
    """The assignment with a mark for its value; quotes stay, for the value that comes back."""
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
