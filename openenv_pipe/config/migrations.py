"""Read configurations of older versions.

A missing key gets the value of the shipped blocks, where a new key's value must mean the former
behaviour. A value that is refused since then gets the value that trains in the same way. An unknown
key stays an error, and so does a missing key that no shipped block has.
"""

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from openenv_pipe.config.compose import assign, load_values, open_loader, readable_errors
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.schema_keys import locate
from openenv_pipe.errors import ConfigError

# Maps the key with a block's type to the group whose choices are named after the types.
GROUPS = {
    "host.type": "host",
    "model.type": "model",
    "engine.type": "engine",
    "tracker.type": "tracker",
    "env.adapter.type": "env/adapter",
    "env.tasks.train.type": "env/tasks@env.tasks.train",
    "env.tasks.eval.type": "env/tasks@env.tasks.eval",
}
# What pydantic says of a missing key, and the key below the one that it names.
MISSING = {"missing": "", "union_tag_not_found": ".type"}


def validate_older(values: Mapping[str, Any]) -> RunConfig:
    """Validate a configuration of this or an older version.

    Raises:
        ValidationError: Problems are left.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        missing = [
            locate(each["loc"])[0] + MISSING[each["type"]]
            for each in error.errors()
            if each["type"] in MISSING
        ]
        try:
            completed = _sum_turn_credits(_complete(values, missing))
        except (KeyError, ConfigError):  # A block or a type does not exist any more.
            raise error from None
        if completed == values:
            raise
    return validate_older(completed)  # A block whose type was missing may lack more keys.


def _complete(values: Mapping[str, Any], missing: list[str]) -> dict[str, Any]:
    completed: dict[str, Any] = deepcopy(dict(values))
    choices = [f"{group}={_at(completed, key)}" for key, group in GROUPS.items()]
    with readable_errors():
        shipped = load_values(open_loader(), ["conf=smoke", *choices], may_miss=True)
    for key in missing:
        with suppress(KeyError):
            assign(completed, key, _at(shipped, key))
    return completed


def _sum_turn_credits(values: dict[str, Any]) -> dict[str, Any]:
    """Replace `use: mean` of terms with `per_turn: true`, which have always credited the sum."""
    for term in values["reward"]["terms"].values():
        if term.get("per_turn") is True and term.get("use") == "mean":
            term["use"] = "sum"
    return values


def _at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key. Raises KeyError."""
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found
