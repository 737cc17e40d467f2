"""Check actions against an environment's schema, in bounded time for any schema and any action.

The environment checks its actions itself, so what is left out here changes only who rejects
them.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import jsonschema
import referencing

from openenv_pipe.environments.adapters.base import UnusableReply
from openenv_pipe.environments.schemas import Schema, validator_class
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.patterns import LIMIT_S, LimitedPattern, SlowPatternError

MAX_PROBLEMS = 3  # that one message to the model names
MAX_PROBLEM_LENGTH = 200  # characters; a validator repeats the value that it rejects
MAX_COST = 20_000  # of checking one action; a keyword applied to a small value costs 1
VALUES_PER_COST = 100  # members of a list or an object, characters of a text, bits of an integer
MAX_COMPARED = 1000  # items that are all compared with each other
LEFT_OUT = ("patternProperties", "unevaluatedItems", "unevaluatedProperties")

Keyword = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


class ActionCheck:
    """Checks actions against one schema. References are resolved only within the schema."""

    def __init__(self, schema: Schema) -> None:
        """Take a schema that `require_schema` has accepted.

        Raises ConfigError: the schema cannot be applied, not even to an empty action.
        """
        self._cost = 0
        self._search_s = 0.0
        self._validator = self._bounded(validator_class(schema))(
            _without_dialects(schema), registry=referencing.Registry()
        )
        try:
            self.problems({})
        except UnusableReply as error:
            raise ConfigError(
                f"the environment's action schema cannot be applied: {error}; fix the environment"
            ) from None

    def problems(self, action: dict[str, Any]) -> list[str]:
        """List the schema's violations in an action, each with its field.

        Raises:
            UnusableReply: the action cannot be checked within the limits.
            ConfigError: the schema refers to something that does not exist.
        """
        self._cost = 0
        self._search_s = 0.0
        problems: list[str] = []
        try:
            for error in self._validator.iter_errors(action):
                problems.append(_described(error))
                if len(problems) == MAX_PROBLEMS:
                    break
        except referencing.exceptions.Unresolvable as error:
            raise ConfigError(
                f"a reference in the environment's action schema cannot be resolved: {error}"
            ) from None
        except (RecursionError, ArithmeticError, ValueError, SlowPatternError) as error:
            raise UnusableReply(f"the action cannot be checked: {error}") from None
        return problems

    def _bounded(self, kind: Any) -> Any:
        """Return a validator class whose keywords count what they cost."""
        own = {
            "additionalProperties": _unless_by_patterns(kind.VALIDATORS["additionalProperties"]),
            "pattern": self._check_pattern,
            "uniqueItems": _unless_too_many(kind.VALIDATORS["uniqueItems"]),
            **dict.fromkeys(LEFT_OUT, _accept),
        }
        keywords = {
            name: self._counted(own.get(name, check)) for name, check in kind.VALIDATORS.items()
        }
        return jsonschema.validators.extend(kind, keywords)

    def _counted(self, check: Keyword) -> Keyword:
        def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            self._cost += 1 + (_size(value) + _size(instance)) // VALUES_PER_COST
            if self._cost > MAX_COST:
                raise UnusableReply("it takes too long to check the action against its schema")
            return check(validator, value, instance, schema)

        return counted

    def _check_pattern(
        self, validator: Any, value: str, instance: Any, schema: Any
    ) -> Iterator[jsonschema.ValidationError]:
        if not isinstance(instance, str):
            return
        started_s = time.process_time()
        found = _compiled(value).search(instance, max(0.01, LIMIT_S - self._search_s))
        self._search_s += time.process_time() - started_s
        if found is None:
            yield jsonschema.ValidationError(f"{instance!r} does not match {value!r}")


def _described(error: jsonschema.ValidationError) -> str:
    error = jsonschema.exceptions.best_match([error])
    field = ".".join(map(str, error.absolute_path))
    text = f"{field}: {error.message}" if field else error.message
    return text if len(text) <= MAX_PROBLEM_LENGTH else f"{text[:MAX_PROBLEM_LENGTH]}..."


def _without_dialects(schema: Any) -> Any:
    """Copy a schema without `$schema`, by which jsonschema would choose its own validators."""
    if isinstance(schema, list):
        return [_without_dialects(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_dialects(value)
        for key, value in schema.items()
        if key != "$schema" or not isinstance(value, str)
    }


def _size(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | list | dict) else 0


def _accept(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    """Accept every value."""


def _unless_by_patterns(check: Keyword) -> Keyword:
    """Leave additional properties alone where patterns say which ones there may be."""

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if "patternProperties" in schema:
            return None
        return check(validator, value, instance, schema)

    return checked


def _unless_too_many(check: Keyword) -> Keyword:
    """Leave lists alone whose items would take too long to compare with each other."""

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        return None if _size(instance) > MAX_COMPARED else check(validator, value, instance, schema)

    return checked


@lru_cache(maxsize=256)
def _compiled(source: str) -> LimitedPattern:
    return LimitedPattern(source)
