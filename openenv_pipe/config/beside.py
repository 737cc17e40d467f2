"""Change the blocks of an experiment by the keys that are given for it in `beside`."""

from collections.abc import Iterable, Mapping
from typing import Any

BESIDE_BLOCKS = {"env", "host", "reward", "judge", "eval"}  # of the experiment `beside.NAME.conf`


def forget_replaced(beside: dict[str, Any], keys: Iterable[str]) -> None:
    """Forget all but the weight of saved environments that get another experiment by these keys."""
    for key in keys:
        name = key.removeprefix("beside.").removesuffix(".conf")
        if key == f"beside.{name}.conf" and name in beside:
            beside[name] = {"weight": beside[name]["weight"]}


def merge(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Set the given keys. A mapping changes keys of one, unless it chooses another type."""
    for key, value in given.items():
        old: Any = values.get(key)
        both = isinstance(old, dict) and isinstance(value, Mapping)
        if both and ("type" not in value or value["type"] == old.get("type")):
            merge(old, value)
        else:
            values[key] = value
