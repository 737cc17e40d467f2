"""Parts that users or plugins add: `target: module:name` and `options` of a configuration.

A target makes an object that fulfils a contract (a host, a tracker), or is itself a function that
is called again and again (a loss, an advantage). What its signature and its class tell is checked
without calling it; the rest is checked when the part is built.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.system.copies import copied
from openenv_pipe.system.resources import load_callable
from openenv_pipe.system.user_code import named

Part = TypeVar("Part")


class Target(Protocol):
    """A block of `type: python` (`config.schema.base.PythonTarget`)."""

    @property
    def target(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


def check_part(
    key: str, block: Target, contract: type[Any], num_arguments: int
) -> Callable[..., Any]:
    """Import the target of a part and return it, without calling it.

    key: where the block stands in the configuration, for messages.
    contract: the Protocol that the part fulfils. A class as the target must have its methods.

    Raises ConfigError: the target cannot be imported, is of another kind, or does not take
    `num_arguments` arguments and its options.
    """
    make = _load_target(key, block, num_arguments)
    if isinstance(make, type) and not hasattr(make, "__getattr__"):
        methods = [name for name in _members(contract) if callable(vars(contract).get(name))]
        missing = [name for name in methods if not hasattr(make, name)]
        _reject_missing(key, block, make, missing, contract)
    return make


def build_part(key: str, block: Target, contract: type[Part], *arguments: Any) -> Part:
    """Call the target with the arguments and, as keyword arguments, its options.

    key: where the block stands in the configuration, for messages.
    contract: the Protocol whose members the result must have.
    Raises ConfigError if the target cannot be imported or called, or if members are missing.
    """
    make = check_part(key, block, contract, len(arguments))
    name = f"{key}.target={block.target!r} with {_described(len(arguments), block)}"
    with named(name, (PipeError,)):
        part = make(*arguments, **copied(block.options))
    missing = [
        name
        for name in _members(contract)  # The class first: a property may not be readable yet.
        if not hasattr(type(part), name) and not hasattr(part, name)
    ]
    _reject_missing(key, block, type(part), missing, contract)
    return part


def load_function(
    key: str, block: Target, num_arguments: int, *, may_be_async: bool = False
) -> Callable[..., Any]:
    """Import the target, a function of `num_arguments` arguments and the block's options.

    may_be_async: whether the caller awaits what an async function returns.
    Raises ConfigError if the target cannot be imported, is a class, or does not take these
    arguments.
    """
    function = _load_target(key, block, num_arguments, may_be_async=may_be_async)
    if isinstance(function, type):
        raise ConfigError(
            f"{key}.target={block.target!r} is a class; expected a function, or an object with "
            "__call__"
        )
    return function


def call_problem(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str | None:
    """Say why a function cannot be called with these arguments, as far as its signature tells."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        return str(error)
    except ValueError:  # Some functions that are not written in Python have no signature.
        return None
    return None


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name, as far as its signature tells."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _load_target(
    key: str, block: Target, num_arguments: int, *, may_be_async: bool = False
) -> Callable[..., Any]:
    """Import a target. Raises ConfigError if it cannot be called with arguments and options."""
    target = load_callable(block.target)
    if inspect.iscoroutinefunction(target) and not may_be_async:
        problem: str | None = "it is an async function, whose result nothing awaits"
    else:
        problem = call_problem(target, *range(num_arguments), **block.options)
    if problem:
        raise ConfigError(
            f"{key}.target={block.target!r} cannot be called with "
            f"{_described(num_arguments, block)}: {problem}"
        )
    return target


def _reject_missing(
    key: str, block: Target, made: type, missing: list[str], contract: type
) -> None:
    """Raise ConfigError if what a target makes, a `made`, lacks members of its contract."""
    if missing:
        raise ConfigError(
            f"{key}.target={block.target!r} makes a {made.__name__} without "
            f"{', '.join(missing)}; {contract.__module__}.{contract.__name__} says what they do"
        )


def _described(num_arguments: int, block: Target) -> str:
    """Say what a target is called with, without the options' values, which may be secrets."""
    noun = "argument" if num_arguments == 1 else "arguments"
    return f"{num_arguments} {noun} and the options [{', '.join(block.options)}]"


def _members(contract: type) -> list[str]:
    """The public attributes and methods that a Protocol declares, in their order."""
    return [
        name
        for name in dict.fromkeys([*contract.__annotations__, *vars(contract)])
        if not name.startswith("_")
    ]
