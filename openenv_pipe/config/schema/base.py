"""The base class of all blocks, and the types that several of them use."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, bool | int | float) else value


Text = Annotated[str, BeforeValidator(_text)]  # YAML and the command line read 7 as a number.
DottedPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$", examples=["wordle.rewards:name"])]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Port = Annotated[int, Field(ge=1, le=65535)]
ServerUrl = Annotated[
    str,
    Field(
        pattern=r"^(https?|wss?)://[^/?#@\s]+(/[^?#\s]*)?$", examples=["https://a.example/wordle"]
    ),
]


class Block(BaseModel):
    """Base of all blocks: frozen, without unknown keys, without conversions from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PythonTarget(Block):
    """Base of the parts that Python code provides: your own, or those of a plugin."""

    type: Literal["python"]
    target: DottedPath = Field(description="module:name of a class or a function")
    options: dict[str, Any] = Field(description="its keyword arguments")
