"""Copies of data that goes to user code and comes from there."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel

from openenv_pipe.types import Image

Value = TypeVar("Value")

ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


def copied(value: Value) -> Value:
    """Return a copy of data classes, JSON and configurations that shares nothing mutable with it.

    Other objects, such as tensors and functions, are returned as they are. A list of numbers is
    copied in one step, because lists of token ids are long.
    """
    copy_of: Value = _COPIERS[type(value)](value)
    return copy_of


class _Copiers(dict[type, Callable[[Any], Any]]):
    """The function that copies objects of a class, which is chosen once: episodes are large."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        self[kind] = copier = _copier(kind)
        return copier


_COPIERS = _Copiers()


def _copier(kind: type) -> Callable[[Any], Any]:
    if kind in ATOMS or issubclass(kind, Enum | type):
        return _same
    if issubclass(kind, list):
        return _list
    if kind is tuple:
        return lambda values: tuple([_COPIERS[type(value)](value) for value in values])
    if kind is Image:
        return copy.copy  # its values are text and numbers
    if issubclass(kind, Mapping):
        return _mapping
    if kind in (set, frozenset):
        return kind
    if issubclass(kind, BaseModel):
        return lambda value: value.model_copy(deep=True)
    if is_dataclass(kind) and kind.__module__.startswith("openenv_pipe."):
        return _copier_of_dataclass(kind)
    return _same


def _same(value: Any) -> Any:
    return value


def _list(values: list[Any]) -> list[Any]:
    if ATOMS.issuperset(map(type, values)):
        return values[:]
    return [_COPIERS[type(value)](value) for value in values]


def _mapping(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        key: value if type(value) in ATOMS else _COPIERS[type(value)](value)
        for key, value in values.items()
    }


def _copier_of_dataclass(kind: Any) -> Callable[[Any], Any]:
    names = [each.name for each in fields(kind)]
    set_value = object.__setattr__ if kind.__dataclass_params__.frozen else setattr

    def copy_of(value: Any) -> Any:
        made: Any = object.__new__(kind)
        for name in names:
            part = getattr(value, name)
            copy_of_part = part if type(part) in ATOMS else _COPIERS[type(part)](part)
            set_value(made, name, copy_of_part)
        return made

    return copy_of
