"""Find the keys in which two configurations differ."""

from typing import Any

from pydantic import JsonValue

from openenv_pipe.config.schema import RunConfig


def changed_keys(before: RunConfig, after: RunConfig) -> dict[str, list[JsonValue]]:
    """Return the differing dotted keys with both values; None where a key is missing."""
    old, new = flat(before.model_dump(mode="json")), flat(after.model_dump(mode="json"))
    keys = sorted({*old, *new})
    return {key: [old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)}


def flat(value: Any, prefix: str = "") -> dict[str, JsonValue]:
    """Map dotted keys to values; lists and empty mappings are values."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, JsonValue] = {}
    for key, each in value.items():
        found |= flat(each, f"{prefix}.{key}" if prefix else key)
    return found
