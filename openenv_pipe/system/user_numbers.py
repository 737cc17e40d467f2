"""Read numbers that user code gives: values of reward terms, verifiers, advantages, and steps.

Only numbers count as numbers. A text or a set is rejected, although Python could turn it into one.
"""

import math
import operator
from decimal import Decimal
from numbers import Real
from typing import Any

MAX_REWARD = 1e15  # Sums and squares of rewards up to this are exact enough, and finite.
MAX_SHOWN = 80  # characters of a value in a message


def read_number(value: Any) -> float:
    """Return a number as a float: of Python, numpy or torch, a bool, a Decimal, or a fraction.

    Raises ValueError if it is something else, not finite, or above MAX_REWARD in absolute value.
    """
    expected = f"expected a finite number of at most {MAX_REWARD:g} in absolute value"
    if not is_one_number(value):
        raise ValueError(f"{shown(value)} ({type(value).__name__}); {expected}")
    item = value.tolist() if is_array(value) else value
    try:
        number = float(item) if isinstance(item, Real | Decimal) else math.nan
    except Exception:  # a signalling NaN, 10 ** 400, a number of a user's own class
        number = math.nan
    if not abs(number) <= MAX_REWARD:  # NaN compares as False.
        raise ValueError(f"{shown(value)}; {expected}")
    return number


def read_numbers(value: Any) -> list[float]:
    """Return the numbers of a list, a tuple or an array with one dimension.

    Raises ValueError if it is something else, or if one of them is not a number.
    """
    is_one_dimensional = is_array(value) and len(value.shape) == 1
    if type(value) is not tuple and not isinstance(value, list) and not is_one_dimensional:
        raise ValueError(
            f"{shown(value)} ({type(value).__name__}); expected a list of numbers, a tuple, or an "
            "array with one dimension"
        )
    numbers = []
    for place, each in enumerate(value.tolist() if is_one_dimensional else value):
        try:
            numbers.append(read_number(each))
        except ValueError as error:
            raise ValueError(f"{shown(value)}, in which number {place} is {error}") from None
    return numbers


def whole_number(value: Any) -> int | None:
    """Return a whole number of Python, numpy or torch as an int; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor or a numpy array or scalar, but not of times or texts."""
    has_members = all(hasattr(value, name) for name in ("dtype", "shape", "tolist"))
    return has_members and getattr(value.dtype, "kind", "f") in "biufcO"


def is_one_number(value: Any) -> bool:
    """Return whether a value is meant as one number, not as a list of them."""
    if hasattr(value, "dtype"):
        return is_array(value) and value.shape == ()
    return isinstance(value, Real | Decimal)


def shown(value: Any) -> str:
    """Return a value's beginning as Python writes it, for messages."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # it is of a user's class
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
