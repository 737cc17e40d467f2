"""Blocks whose types are registered: the value of `type` chooses the class."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import core_schema

from openenv_pipe.registry import block_types, load


@dataclass(frozen=True)
class Registered:
    """In `Annotated[Base, Registered("host")]`: the value is a block of any registered type.

    The base class is what type checkers see. The classes are imported when the first configuration
    is validated, so that their modules can import those of the schema.
    """

    block: str

    @property
    def classes(self) -> dict[str, type[BaseModel]]:
        """The class of each type."""
        return {name: load(each.config) for name, each in block_types(self.block).items()}

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        choices = {name: handler.generate_schema(each) for name, each in self.classes.items()}
        return core_schema.tagged_union_schema(choices, discriminator="type", from_attributes=True)
