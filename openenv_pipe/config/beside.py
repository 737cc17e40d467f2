"""The blocks of environments in `beside`: how keys change them, and where each key is set."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BESIDE_BLOCKS = {"env", "host", "reward", "judge", "eval"}  # of the experiment `beside.NAME.conf`


def forget_replaced(beside: dict[str, Any], keys: Iterable[str]) -> None:
    """Keep only the weight of saved environments whose experiment one of these keys replaces."""
    for key in keys:
        name = key.removeprefix("beside.").removesuffix(".conf")
        if key == f"beside.{name}.conf" and name in beside:
            beside[name] = {"weight": beside[name]["weight"]}


def merge(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Set the given keys. A mapping is merged into the old one, unless it chooses another type."""
    for key, value in given.items():
        old: Any = values.get(key)
        both = isinstance(old, dict) and isinstance(value, Mapping)
        if both and ("type" not in value or value["type"] == old.get("type")):
            merge(old, value)
        else:
            values[key] = value


def beside_origins(name: str, origins: Mapping[str, Path | str]) -> dict[str, Path | str]:
    """Return the origins of the block `beside.NAME` from those of its experiment."""
    own = {key.removeprefix("trainer."): where for key, where in origins.items()}
    blocks = {*BESIDE_BLOCKS, "advantage"}
    return {
        f"beside.{name}.{key}": where for key, where in own.items() if key.split(".")[0] in blocks
    }
