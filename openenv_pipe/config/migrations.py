"""Read configurations of older versions.

A missing key gets the value of the shipped blocks, or that of `FORMER`, which has to mean the
former behaviour. A value that is refused since then gets the value that trains in the same way. An
unknown key stays an error, and so does a missing key that no shipped block has.
"""

from collections.abc import Container, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from openenv_pipe.config.compose import assign, load_values, open_loader, readable_errors
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.schema.reward import RESERVED_NAMES
from openenv_pipe.config.schema.tracker import name_older_tracker
from openenv_pipe.config.schema_keys import locate
from openenv_pipe.errors import ConfigError

# Maps the key with a block's type to the group whose choices are named after the types.
GROUPS = {
    "host.type": "host",
    "model.type": "model",
    "engine.type": "engine",
    "cluster.type": "cluster",
    "judge.type": "judge",
    "agent.type": "agent",
    "agent.sandbox.type": "agent/sandbox",
    "env.adapter.type": "env/adapter",
    "env.tasks.train.type": "env/tasks@env.tasks.train",
    "env.tasks.eval.type": "env/tasks@env.tasks.eval",
}
# Values that meant the former behaviour, where the shipped ones mean another.
FORMER = {"trainer.loss.normalise_groups": "with_signal"}
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
            completed = _update_reward(_complete(values, missing))
        except (KeyError, TypeError, AttributeError, ConfigError):
            raise error from None  # A block or a type does not exist any more, or differs in shape.
        if completed == values:
            raise
    return validate_older(completed)  # A block whose type was missing may lack more keys.


def _complete(values: Mapping[str, Any], missing: list[str]) -> dict[str, Any]:
    completed: dict[str, Any] = deepcopy(dict(values))
    choices = []
    for key, group in GROUPS.items():
        with suppress(KeyError):  # a block that older versions did not have
            choices.append(f"{group}={_at(completed, key)}")
    with readable_errors():
        loader = open_loader()
        completed["tracker"] = trackers = name_older_tracker(completed.get("tracker", {}))
        known = [name for name in loader.get_group_options("tracker") if name in trackers]
        choices.append(f"tracker=[{','.join(known)}]")
        shipped = load_values(loader, ["conf=smoke", *choices], may_miss=True)
    for key in missing:
        with suppress(KeyError):
            assign(completed, key, FORMER.get(key) or _at(shipped, key))
    return completed


def _update_reward(values: dict[str, Any]) -> dict[str, Any]:
    """Change reward terms that are refused now, such that the run trains as before.

    A term with `per_turn: true` has always credited the sum, so its `use: mean` becomes `use: sum`.
    A term with the name of a metric of the whole reward gets another name. If that changes what
    the metric of the best checkpoint measures, success decides: values from before and after a
    resume must be comparable, or the best checkpoint of before could be deleted.
    """
    terms = values["reward"]["terms"]
    changed = {f"reward/{name}" for name in terms if name in RESERVED_NAMES}
    for name, term in terms.items():
        if term.get("per_turn") is True and term.get("use") == "mean":
            term["use"] = "sum"
            changed |= {f"reward/{name}", "reward/mean", "reward/std", "eval/reward"}
    values["reward"]["terms"] = {_free_name(name, terms): term for name, term in terms.items()}
    best = values["trainer"]["checkpoint"]["best"]
    if best and best["metric"] in changed:
        of_evaluations = best["metric"].startswith("eval/")
        best["metric"] = "eval/success" if of_evaluations else "success/rate"
        best["direction"] = "max"
    return values


def _free_name(name: str, terms: Container[str]) -> str:
    """Return a term's name, with `_term` behind a reserved one until no other term has it."""
    if name not in RESERVED_NAMES:
        return name
    name += "_term"
    while name in terms:
        name += "_term"
    return name


def _at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key. Raises KeyError."""
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found
