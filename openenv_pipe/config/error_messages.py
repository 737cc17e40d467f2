"""Explain errors of pydantic, Hydra, OmegaConf and YAML in terms of the user's keys.

Each message names the key, the value seen, the value expected, and the next action.
"""

import difflib
import json
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from openenv_pipe.config.rules import BrokenRulesError
from openenv_pipe.config.schema_keys import choices, expectation, known_keys, locate, type_names
from openenv_pipe.config.secrets import shown_override
from openenv_pipe.config.yaml_files import Origins, find_line
from openenv_pipe.registry import extras, if_command, load
from openenv_pipe.system.plugins import unusable_plugins_note
from openenv_pipe.system.resources import did_you_mean, group_names, group_options, short_path
from openenv_pipe.system.secrets import is_secret_name, redact

SEE_KEYS = "all keys, and where their values come from: openenv-pipe show conf=NAME"
MAX_VALUE_LENGTH = 80
MAX_KEY_LENGTH = 200
MAX_SHOWN = 20  # problems of one configuration
SWITCHES = ("steps", "coef", "rank")  # keys whose value 0 switches their block off
PRIVATE_BLOCKS = ("headers", "variables")
# Matches unknown keys that may be misspelt names of secrets.
LIKE_A_SECRET = re.compile(r".*(?:key|kei|token|secret|passw|auth|cred).*", re.IGNORECASE)


def explain_validation(
    error: ValidationError, schema: type[BaseModel], origins: Origins | None = None
) -> str:
    """Explain all problems at once, one line each if there are several.

    origins: of the keys, as far as they are known.
    """
    # Every branch of a union reports the same key, so duplicates are removed.
    details = error.errors(include_url=False)
    found = [
        problem
        for detail in details[:MAX_SHOWN]
        for problem in _problems(detail, schema, origins or {})
    ]
    return list_problems(list(dict.fromkeys(found)), num_more=max(0, len(details) - MAX_SHOWN))


def list_problems(problems: Sequence[str], num_more: int = 0) -> str:
    """Return problems of a configuration as one text. num_more: how many are not listed."""
    if len(problems) == 1:
        return f"{problems[0]} ({SEE_KEYS})"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    more = f"\n  - and {num_more:,} more" if num_more else ""
    return f"{len(problems) + num_more} problems in the configuration:{lines}{more}\n({SEE_KEYS})"


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a damaged file in one line, and the number of others."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    others = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    shown = f"{where}: {first['msg']}, not {first['input']!r:.80}" if where else first["msg"]
    return f"{shown}{others}"


def _problems(detail: ErrorDetails, schema: type[BaseModel], origins: Origins) -> Sequence[str]:
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, BrokenRulesError):
        return error.messages
    return [_problem(detail, schema, origins)]


def _problem(detail: ErrorDetails, schema: type[BaseModel], origins: Origins) -> str:
    key, block, annotation = locate(detail["loc"], schema)
    key = key if len(key) <= MAX_KEY_LENGTH else f"{key[:MAX_KEY_LENGTH]}..."
    match detail["type"]:
        case "value_error":
            return f"{key}: {detail['ctx']['error']}" if key else str(detail["ctx"]["error"])
        case "extra_forbidden":
            shown = _shown(detail["input"], key, exists=False)
            return f"{key}={shown}: {_unknown_key(key, detail['input'], block, schema, origins)}"
        case "missing":
            return f"{key} is missing; expected {expectation(annotation)}"
        case "union_tag_not_found":
            return f"{key}.type is missing; expected one of {', '.join(type_names(annotation))}"
        case "union_tag_invalid":
            tag, tags = detail["ctx"]["tag"], detail["ctx"]["expected_tags"]
            near = did_you_mean(tag, [name.strip("'") for name in tags.split(", ")])
            if key == "trainer.loss" and (advice := _other_name("loss", tag)):
                near = f"; {advice}"
            elif key == "trainer.loss" and tag in group_options("trainer"):
                near = f"; trainer={tag} chooses it, with its normalisation and advantages"
            return f"{key}.type={_shown(tag)}: expected one of {tags}{near}"
    value, group = detail["input"], key.replace(".", "/")
    if isinstance(value, str) and value in group_options(group):
        return (
            f"{key}={_shown(value)}: expected a block, of which a file chooses one by name in its "
            f"defaults list: defaults: [override /{group}: {value}, _self_]"
        )
    near = did_you_mean(value, choices(annotation)) if isinstance(value, str) else ""
    off = [name for name in SWITCHES if name in getattr(annotation, "model_fields", ())]
    if value is None and off:
        near = f"; {key}.{off[0]}=0 switches it off"
    return f"{key}={_shown(value, key)}: expected {expectation(annotation)}{near}"


def _unknown_key(
    key: str, value: Any, block: Any, schema: type[BaseModel], origins: Origins
) -> str:
    known = known_keys(schema)
    if key in known:  # It belongs to another type of the same block.
        return (
            f"not a key of this type, which has {', '.join(block.model_fields)}; "
            f"{_set_by(key, origins)}"
        )
    leaf = key.rpartition(".")[2]
    if advice := _other_name(leaf, value):
        return f"there is no such key; {advice}"
    near = [other for other in known if other.rpartition(".")[2] == leaf][:3]
    # A similar key of the same block is likelier meant than a similar path elsewhere.
    block_path = key[: -len(leaf)]
    beside = [other for other in known if other.rpartition(".")[0] == block_path[:-1]]
    leaves = [other.rpartition(".")[2] for other in beside]
    is_listed = not beside and block is not None  # within a list or a mapping of names
    leaves = [*block.model_fields] if is_listed else leaves
    near = near or [block_path + each for each in difflib.get_close_matches(leaf, leaves, n=2)]
    if is_listed and not near:
        return f"there is no such key; this block has {', '.join(leaves)}"
    near = near or difflib.get_close_matches(key, known, n=2)
    return f"there is no such key; did you mean {' or '.join(near)}?" if near else "no such key"


def _set_by(key: str, origins: Origins) -> str:
    """Say what sets a key that does not fit, and how it is left out."""
    setting = (each for each in origins if each == key or each.startswith(f"{key}."))
    match origins.get(next(setting, "")):
        case Path() as path:
            line = find_line(path, key)
            where = short_path(path) if line is None else f"{short_path(path)}, line {line},"
            return f"{where} sets it; leave it out with '~{key}'"
        case None:
            return f"if a file has it, leave it out with '~{key}'"
        case override:
            return f"leave out {shown_override(override)}"


def _other_name(name: str, value: Any) -> str | None:
    """Return an extra's advice about a key that does not exist; None if no extra has any."""
    found = (load(extra.other_names)(name, value) for extra in extras() if extra.other_names)
    return next(filter(None, found), None)


def _shown(value: Any, key: str = "", *, exists: bool = True) -> str:
    """Return a value as JSON, cut off where it is long, and hidden where it may be a secret."""
    leaf = key.rpartition(".")[2]
    is_private = is_secret_name(leaf) or leaf in PRIVATE_BLOCKS
    is_private |= not exists and LIKE_A_SECRET.fullmatch(leaf) is not None
    if is_private and not isinstance(value, bool | int | float | None):
        return "<hidden>"
    text = redact(json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."


def explain_override(text: str) -> str:
    return (
        f"cannot read the override {shown_override(text)}; expected key=value, such as "
        "trainer.steps=10, or group=choice, such as model=tiny; put quotes around a value with "
        "spaces, commas or brackets: 'key=\"a, b\"'"
    )


def explain_choice(group: str, seen: Any) -> str:
    options = group_options(group)
    near = did_you_mean(str(seen), options)
    if group == "trainer" and (advice := _other_name("loss", seen)):
        near = f"; {advice}"
    what = "experiment" if group == "conf" else "choice"
    made = ""
    if group in ("conf", "env"):
        made = if_command("env", ", as `openenv-pipe env new NAME` does with a new environment")
    return (
        f"{group}={_shown(seen)}: there is no such {what}; there are {', '.join(options)}{near}; "
        f"put your own into ./conf/{group}/<name>.yaml{made}{unusable_plugins_note()}"
    )


def explain_missing(keys: Sequence[str]) -> str:
    """Explain keys that the YAML leaves to the user (`???`)."""
    wanted = [f"{key}=<{expectation(locate(key.split('.'))[2])}>" for key in keys]
    return f"no value for {', '.join(keys)}; add {' '.join(wanted)}"


def explain_yaml(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"not valid YAML: {' '.join(str(error).split())}"
    hint = "indent with spaces, and quote text that contains a colon, bracket or quote"
    problem = getattr(error, "problem", None) or str(error)
    return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {problem}; {hint}"


def explain_composition(error: Exception) -> str:
    path = getattr(error, "missing_cfg_file", None)
    if path:
        group, _, name = path.rpartition("/")
        if group in group_names():
            return explain_choice(group, name)
        return f"there is no file {path}.yaml in conf/, and a defaults list names it"
    if unchosen := re.match(r"You must specify '([^']+)'", str(error)):
        return _unchosen(unchosen[1])
    cause = error.__cause__ if hasattr(error.__cause__, "full_key") else error
    key = getattr(cause, "full_key", None)
    text = " ".join(str(cause).partition("\n    full_key:")[0].split())
    if variable := re.search(r"Environment variable '([^']+)' not found", text):
        text = f"the environment variable {variable[1]} is not set; export it, or set another {key}"
    if unfound := re.match(r"Interpolation key '([^']+)' not found", text):
        text = f"${{{unfound[1]}}} names no key{did_you_mean(unfound[1], known_keys())}"
    if unset := re.match(r"Could not delete from config. '([^']+)' does not exist", text):
        return f"~{unset[1]}: there is no such key to remove ({SEE_KEYS})"
    return f"{key}: {text} ({SEE_KEYS})" if key else text


def explain_recursion(error: RecursionError) -> str:
    """Explain values or defaults lists that Hydra cannot follow to their end."""
    # Hydra has one frame for each defaults list that it is in.
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = [
        frame.f_locals["path"]
        for frame in frames
        if frame.f_code.co_name == "_create_defaults_tree_impl" and "path" in frame.f_locals
    ]
    if len(names) < MAX_SHOWN:
        return "values are nested too deep, or interpolations such as ${name} are"
    circle = ", ".join(f"{name}.yaml" for name in dict.fromkeys(names[-MAX_SHOWN:]))
    return f"defaults lists lead back to their own file: {circle}; remove one entry of them"


def _unchosen(group: str) -> str:
    options = group_options(group)
    what = "no experiment was named" if group == "conf" else f"nothing was chosen for {group}"
    example = "wordle" if "wordle" in options else options[0]
    return f"{what}; add {group}=<name>, such as {group}={example}; there are {', '.join(options)}"
