"""Keep secrets out of the files of runs, and put them back when a configuration is read.

All files have `<hidden: HF_TOKEN>` in place of a secret (`system/secrets.py`); when a
configuration is read back, the environment variable of that name is inserted again.
"""

import os
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from openenv_pipe.errors import RunFolderError
from openenv_pipe.system.secrets import (
    MARK,
    MIN_SECRET_LENGTH,
    SECRET_NAME,
    environment_secrets,
    is_secret_name,
    named_secrets,
    remember_secrets,
    url_secrets,
)

SCHEME = r"(?:(?:Bearer|Basic)\s+)?"
# These values only say where the secret is, or that there is none. A variable with a default is not
# among them, because the default may be the secret.
NO_SECRET = (
    rf"""['"]?{SCHEME}(?:<hidden|\$\{{oc\.env:\w+\}}['"]?\s*(?:[,}}\]]|$))"""
    r"|null(?![^\s,}\]])"
)
SECRET_VALUE = (
    rf"""'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<plain>{SCHEME}(?:\$\{{[^}}]*\}}|[^\s,}}])+)"""
)
ASSIGNMENT = re.compile(
    rf"\b(?P<name>{SECRET_NAME})\s*[=:]\s*(?!{NO_SECRET})(?:{SECRET_VALUE})", re.IGNORECASE
)

# Tokens of GitHub, GitLab, Hugging Face, OpenAI, Slack and AWS, by their prefixes.
TOKEN = re.compile(
    r"\b(?:(?:gh[opsu]_|github_pat_|glpat-|hf_|sk-|xox[abeprs]-)[\w-]{16,}|AKIA[0-9A-Z]{16}\b)"
)


def hide_secrets(text: str, secrets: Mapping[str, str]) -> str:
    """Replace each secret's value in `text` by its mark. `secrets` maps values to names."""
    for value in sorted(secrets, key=len, reverse=True):  # One secret may contain another.
        text = text.replace(value, f"<hidden: {secrets[value]}>")
    return text


def hide_in_code(text: str, secrets: Mapping[str, str]) -> str:
    """Hide secrets in code or a diff of it: known ones, those in URLs, and tokens by their form."""
    return TOKEN.sub("<hidden: token>", _hide_in_urls(hide_secrets(text, secrets)))


def hide_assignments(text: str, secrets: Mapping[str, str]) -> str:
    """Hide secrets in command lines and overrides, where `api_key=...` also reveals one."""
    return _hide_in_urls(ASSIGNMENT.sub(_hide_value, hide_secrets(text, secrets)))


def _hide_in_urls(text: str) -> str:
    for name, value in url_secrets(text):
        text = text.replace(value, f"<hidden: {name}>")
    return text


def assigned_secrets(text: str, secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return names and values of the secrets that `hide_assignments` hides beside known ones."""
    text = hide_secrets(text, secrets)
    found = [(each["name"], each[each.lastgroup or 0]) for each in ASSIGNMENT.finditer(text)]
    return found + list(url_secrets(ASSIGNMENT.sub(_hide_value, text)))


def shown_override(override: str | None) -> str:
    """Return an override for an error message: in quotes, and without secrets.

    The whole value of a secret key is hidden, because a secret may contain any character.
    """
    override = override or ""
    key, equals, _ = override.partition("=")
    if equals and is_secret_name(re.split(r"[.@/]", key.strip())[-1]):
        return repr(f"{key}=<hidden>")
    return repr(hide_assignments(override, environment_secrets()))


def hide_in_config(value: Any, secrets: Mapping[str, str], key: str = "") -> Any:
    """Copy a configuration's dump without the values of secret keys and known secrets.

    A mark stays as it is, because a command restores only the saved secrets that it uses.
    """
    if isinstance(value, Mapping):
        return {name: hide_in_config(item, secrets, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hide_in_config(item, secrets, key) for item in value]
    if not isinstance(value, str):
        return value
    hidden = hide_secrets(value, secrets)
    is_open = hidden == value and value and not MARK.search(value)
    by_name = is_open and is_secret_name(key)
    return f"<hidden: {_variable_with(value) or key}>" if by_name else hidden


def _variable_with(secret: str) -> str | None:
    """Return the environment variable that a secret came from, as its name and value suggest."""
    named = (name for name, value in os.environ.items() if value == secret)
    return next(filter(is_secret_name, named), None)


def restore_in_config(value: Any, *, needs_all: bool = True) -> Any:
    """Undo `hide_in_config`.

    Raises RunFolderError: The environment variable of a hidden value is not set. Without
    `needs_all`, the mark stays instead.
    """
    if isinstance(value, Mapping):
        items = value.items()
        return {name: restore_in_config(item, needs_all=needs_all) for name, item in items}
    if isinstance(value, list):
        return [restore_in_config(item, needs_all=needs_all) for item in value]
    if not isinstance(value, str):
        return value
    return MARK.sub(_from_environment if needs_all else _if_in_environment, value)


def unwritten_secrets(config: Any) -> dict[str, str]:
    """Return the secrets, by name, that `restore_in_config` would not find in the environment."""
    short = {  # those are hidden only where they are the whole value of their key
        name: value
        for name, value in _named_strings(config)
        if 0 < len(value) < MIN_SECRET_LENGTH and is_secret_name(name) and not _variable_with(value)
    }
    long = {name: value for value, name in known_secrets(config).items()}
    return {name: value for name, value in (short | long).items() if name not in os.environ}


def known_secrets(config: Any) -> dict[str, str]:
    """Map values to names of the secrets in a configuration's dump and in the environment.

    A secret that is in both, even as part of a configured value such as "Bearer ...", has the
    variable's name, because `restore_in_config` looks there. Other names have one value each.
    """
    ours = environment_secrets()
    variables = {value: name for name, value in os.environ.items()}
    known: dict[str, str] = {}
    for value, name in named_secrets(_named_strings(config)).items():
        if any(each in value for each in ours):
            continue
        names = (name if number == 1 else f"{name}_{number}" for number in count(1))
        known[value] = variables.get(value) or next(
            each for each in names if each not in known.values()
        )
    return known | ours


def remember_config(values: Any) -> None:
    """Let all output hide the secrets of a configuration, and the variables that it passes on."""
    remember_secrets(known_secrets(values) | dict(_inherited(values)))


def _inherited(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield values and names of the variables that a block `variables` passes on by null."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if key == "variables" and item is None and name in os.environ:
                yield os.environ[name], name
            yield from _inherited(item, name)


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


def _if_in_environment(mark: re.Match[str]) -> str:
    # A mark may also name the credentials within a variable that is a URL.
    values = {name: value for value, name in environment_secrets().items()} | dict(os.environ)
    return values.get(mark.group(1), mark.group())


def _from_environment(mark: re.Match[str]) -> str:
    name, value = mark.group(1), _if_in_environment(mark)
    if value == mark.group():
        raise RunFolderError(
            f"the value of {name} is a secret and was not written to the run folder; "
            f"set the environment variable {name} and run the command again"
        )
    return value
