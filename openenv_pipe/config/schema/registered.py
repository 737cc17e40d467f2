"""Values that are registered: blocks whose `type` chooses the class, and names of types."""

from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True)
class RegisteredName:
    """In `Annotated[str, RegisteredName("engine.launch")]`: the value is the name of a type."""

    block: str

    @property
    def names(self) -> Any:
        """The type whose values are all names."""
        return Literal[tuple(block_types(self.block))]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return handler.generate_schema(self.names)
