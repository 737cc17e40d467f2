"""Gymnasium's spaces for players of text: the type of an action, and values as text."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from gymnasium import spaces
from pydantic import AfterValidator, BeforeValidator, Field, create_model

from .models import GymnasiumAction

MAX_NUMBERS = 1000  # of an observation whose value is sent
MAX_LISTED = 100  # discrete actions of a space whose legal ones are listed


class SpaceError(ValueError):
    """A space that has no text."""


def action_model(space: spaces.Space[Any]) -> type[GymnasiumAction]:
    """Return the action's type, whose field `action` accepts exactly the values of the space.

    Raises SpaceError for other spaces than Discrete, MultiDiscrete and MultiBinary of one
    dimension, and Text.
    """
    match space:
        case spaces.Discrete():
            kind: Any = _integer(space.start, space.n)
        case spaces.MultiDiscrete() if len(space.shape) == 1:
            pairs = zip(space.start, space.nvec, strict=True)
            kind = tuple[*(_integer(start, count) for start, count in pairs)]
        case spaces.MultiBinary() if len(space.shape) == 1:
            kind = tuple[*(_integer(0, 2) for _ in range(space.shape[0]))]
        case spaces.Text():
            bounds = Field(min_length=space.min_length, max_length=space.max_length)
            kind = Annotated[str, bounds]
        case _:
            raise SpaceError(
                f"the action space is {space}; expected Discrete, MultiDiscrete or MultiBinary of "
                "one dimension, or Text"
            )

    def read(value: Any) -> Any:
        # Players of text write lists as JSON. Anything else stays, to be rejected as it is.
        is_written = isinstance(value, str) and value.startswith("[")
        try:
            return json.loads(value) if is_written and space.shape else value
        except (ValueError, RecursionError):
            return value

    def require(value: Any) -> Any:
        if not space.contains(native(space, value)):
            raise ValueError(f"expected {describe_actions(space)}")
        return value

    field = Field(description=describe_actions(space))
    return create_model(
        "GymnasiumAction",
        __base__=GymnasiumAction,
        action=(Annotated[kind, BeforeValidator(read), AfterValidator(require)], field),
    )


def _integer(start: int, count: int) -> Any:
    return Annotated[int, Field(ge=int(start), le=int(start) + int(count) - 1)]


def native(space: spaces.Space[Any], value: Any) -> Any:
    """Return what the environment's `step` takes for an action of the protocol."""
    return np.array(value, dtype=space.dtype) if isinstance(value, (tuple, list)) else value


def describe_actions(space: spaces.Space[Any]) -> str:
    """Return the values of an action space in words."""
    match space:
        case spaces.Discrete():
            return f"an integer from {space.start} to {space.start + space.n - 1}"
        case spaces.MultiDiscrete():
            pairs = zip(space.start, space.nvec, strict=True)
            ranges = ", ".join(f"{start} to {start + count - 1}" for start, count in pairs)
            return f"a list of {len(space.nvec)} integers: {ranges}"
        case spaces.MultiBinary():
            return f"a list of {space.shape[0]} integers, each 0 or 1"
        case spaces.Text():
            signs = "".join(space.characters)
            return f"a text of {space.min_length} to {space.max_length} of the characters {signs}"
    return str(space)


def legal_actions(space: spaces.Space[Any], mask: Any) -> list[int]:
    """Return the actions that a mask allows, all without a mask, and none of a large space."""
    if not isinstance(space, spaces.Discrete) or space.n > MAX_LISTED:
        return []
    allowed = np.ones(space.n) if mask is None else mask
    return [int(space.start + index) for index in np.flatnonzero(allowed)]


def plain(value: Any) -> Any:
    """Return an observation of any space as values that JSON has."""
    match value:
        case np.ndarray() | np.generic():
            return value.tolist()
        case Mapping():
            return {str(key): plain(part) for key, part in value.items()}
        case tuple() | list():
            return [plain(part) for part in value]
    return value


def count_numbers(value: Any) -> int:
    """Return the number of leaves of a plain value."""
    match value:
        case dict():
            return sum(map(count_numbers, value.values()))
        case list():
            return sum(map(count_numbers, value))
    return 1


def as_text(value: Any) -> str:
    """Return a plain value as text: a text as it is, others as JSON with four digits of floats."""
    return value if isinstance(value, str) else json.dumps(_rounded(value), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {key: _rounded(part) for key, part in value.items()}
        case list():
            return [_rounded(part) for part in value]
    return value
