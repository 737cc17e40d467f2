"""Copies of data that goes to user code and comes from there."""

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel

from openenv_pipe.types import Image

Value = TypeVar("Value")

ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


def copied(value: Value) -> Value:
    """Return a copy of data classes, JSON and configurations that shares nothing mutable with it.

    Other objects, such as tensors and functions, are returned as they are. Lists of numbers are
    copied at once, because those of token ids are long.
    """
    copy_of: Value = _copied(value)
    return copy_of


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in ATOMS or isinstance(value, Enum | type):
        return value
    if isinstance(value, list):
        return value[:] if ATOMS.issuperset(map(type, value)) else [_copied(each) for each in value]
    if kind is tuple:
        return tuple(_copied(each) for each in value)
    if kind is Image:
        return copy.copy(value)  # its values are text and numbers
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    if kind in (set, frozenset):
        return kind(value)
    if isinstance(value, BaseModel):
        return value.model_copy(deep=True)
    if is_dataclass(value) and kind.__module__.startswith("openenv_pipe."):
        made = object.__new__(kind)
        for each in fields(value):
            object.__setattr__(made, each.name, _copied(getattr(value, each.name)))
        return made
    return value
