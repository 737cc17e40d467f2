"""The schema as dotted keys: which keys exist, and which values each expects."""

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.schema.registered import Registered, RegisteredName

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_CONDITIONS = {
    "gt": "more than {}",
    "ge": "at least {}",
    "lt": "less than {}",
    "le": "at most {}",
    "min_length": "with at least {} entry",
    "pattern": "that matches {}",
}


def known_keys(annotation: Any = RunConfig, prefix: str = "") -> list[str]:
    """Return all dotted keys of the schema, with those of blocks and of all types of a block."""
    found: dict[str, None] = {}
    for block in _blocks(annotation):
        for name, field in block.model_fields.items():
            key = prefix + name
            found |= dict.fromkeys([key, *known_keys(field_type(field), f"{key}.")])
    return list(found)


def locate(
    location: Sequence[int | str], schema: type[BaseModel] = RunConfig
) -> tuple[str, type[BaseModel] | None, Any]:
    """Translate pydantic's path of an error into the dotted key, its block and its type.

    Pydantic's path also contains the tried member of a union, which is not a key.
    """
    keys: list[str] = []
    block: type[BaseModel] | None = None
    annotation: Any = schema
    for part in location:
        members = members_of(annotation)
        tagged = [each for each in members if part in _tags(each)]
        if tagged and (len(members) > 1 or _registered(annotation)):
            annotation = tagged[0]
            continue
        holders = [each for each in _blocks(annotation) if part in each.model_fields]
        if holders or (len(members) == 1 and _is_block(members[0])):
            block = holders[0] if holders else members[0]
            keys.append(str(part))
            field = block.model_fields.get(str(part))
            annotation = Any if field is None else field_type(field)
        elif len(members) == 1 and get_origin(members[0]) in (dict, list):
            keys.append(str(part))
            annotation = get_args(members[0])[-1]
    return ".".join(keys), block, annotation


def field_type(field: FieldInfo) -> Any:
    """Return the type of a key's value with its conditions."""
    for each in field.metadata:
        if isinstance(each, RegisteredName):
            return Annotated[each.names, field]
    registered = [each for each in field.metadata if isinstance(each, Registered)]
    return Annotated[(field.annotation, *registered, field)]


def expectation(annotation: Any) -> str:
    """Describe in words what a value of this type must be."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return ", ".join([expectation(arguments[0]), *_conditions(arguments[1:])])
    if origin in (Union, UnionType):
        return " or ".join(expectation(each) for each in arguments)
    if origin is Literal:
        return "one of " + ", ".join("false" if each is False else str(each) for each in arguments)
    if origin is list:
        return f"a list of {expectation(arguments[0])}"
    if annotation is NoneType:
        return "null"
    if _is_block(annotation):
        return f"a block with the keys {', '.join(annotation.model_fields)}"
    return "a mapping" if origin is dict else _NAMES.get(annotation, "another value")


def choices(annotation: Any) -> list[str]:
    """Return the values that a Literal type allows; empty for other types."""
    members = members_of(annotation)
    return [value for each in members if get_origin(each) is Literal for value in get_args(each)]


def type_names(annotation: Any) -> list[str]:
    """Return the values of `type` in a block of several types."""
    return [tag for each in members_of(annotation) for tag in _tags(each)]


def _blocks(annotation: Any) -> Iterator[type[BaseModel]]:
    return (each for each in members_of(annotation) if _is_block(each))


def members_of(annotation: Any) -> list[Any]:
    """Return the types that a value may have, without null."""
    origin = get_origin(annotation)
    if origin is Annotated:
        registered = _registered(annotation)
        inner = get_args(annotation)[0]
        return [*registered.classes.values()] if registered else members_of(inner)
    if origin in (Union, UnionType):
        return [member for each in get_args(annotation) for member in members_of(each)]
    return [] if annotation is NoneType else [annotation]


def _registered(annotation: Any) -> Registered | None:
    return next((each for each in get_args(annotation) if isinstance(each, Registered)), None)


def _is_block(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _tags(annotation: Any) -> tuple[Any, ...]:
    """Return the values of `type` that select this block."""
    if not _is_block(annotation) or "type" not in annotation.model_fields:
        return ()
    return get_args(annotation.model_fields["type"].annotation)


def _conditions(metadata: Sequence[Any]) -> Iterator[str]:
    for condition in metadata:
        if isinstance(condition, FieldInfo):
            yield from _conditions(condition.metadata)
            if condition.examples:
                yield f"such as {condition.examples[0]}"
        for name, words in _CONDITIONS.items():
            if (limit := getattr(condition, name, None)) is not None:
                yield words.format(_written(limit))


def _written(limit: Any) -> str:
    """Write a whole number with commas: 1,000,000, also where the limit is a float."""
    if isinstance(limit, float):
        return f"{int(limit):,}" if limit.is_integer() else f"{limit:g}"
    return f"{limit:,}" if isinstance(limit, int) else str(limit)
