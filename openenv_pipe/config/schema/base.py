"""The base class of all blocks, and the types that several of them use."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from openenv_pipe.config.schema.plain_data import reject_unusual_values
from openenv_pipe.config.secrets import remember_config
from openenv_pipe.system.budgets import MAX_TURNS


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, bool | int | float) else value


def check_header_value(value: str) -> str:
    """Return the value of an HTTP header, if HTTP can carry it.

    Raises ValueError, which does not show the value: a character is not printable ASCII.
    """
    rejected = re.search(r"[^\t\x20-\x7e]", value)
    if rejected is None:
        return value
    at_end = "at its end" if not value[rejected.start() :].strip() else "in it"
    variables = [
        name for name, text in os.environ.items() if text and rejected[0] in text and text in value
    ]
    where = f"; it comes from the environment variable {variables[0]}" if variables else ""
    raise ValueError(
        f"the value, which is not shown, has the character U+{ord(rejected[0]):04X} {at_end}, and "
        f"an HTTP header holds printable ASCII only{where}; set it again without that character"
    )


def _header_name(name: str) -> str:
    if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII):
        raise ValueError(
            "this is not the name of an HTTP header; expected one such as Authorization"
        )
    return name


HeaderName = Annotated[str, AfterValidator(_header_name)]
HeaderValue = Annotated[str, AfterValidator(check_header_value)]
Text = Annotated[str, BeforeValidator(_text)]  # YAML and the command line read 7 as a number.
VariableName = Annotated[str, Field(pattern=r"^[^=]+$", examples=["MY_TOKEN"])]  # as the OS takes
# Environment variables of a program. Null passes on the value that this process has, which is then
# in no file of the run.
Variables = dict[VariableName, Text | None]
DottedPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$", examples=["wordle.rewards:name"])]
Port = Annotated[int, Field(ge=1, le=65535)]
# Numbers have bounds that no real configuration reaches: without them, a typing error could end in
# an overflow, in exhausted memory or in an endless wait. Blocks reject NaN and infinity.
Count = Annotated[int, Field(ge=0, le=10**9)]
PositiveCount = Annotated[int, Field(ge=1, le=10**9)]
NumEpisodes = Annotated[int, Field(ge=1, le=10**6)]  # also of tasks; lists of this length are built
NumProcesses = Annotated[int, Field(ge=1, le=1024)]  # also of threads
LayerSize = Annotated[int, Field(ge=1, le=65536)]  # a width or a number of parts of a model
NumTurns = Annotated[int, Field(ge=1, le=MAX_TURNS)]  # episodes with more could not be read back
NumRetries = Annotated[int, Field(ge=0, le=1000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch accepts no larger one
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e12)]
Positive = Annotated[float, Field(gt=0.0, le=1e12)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]
ShareBelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Seconds = Annotated[float, Field(gt=0.0, le=1e6)]
SecondsOrZero = Annotated[float, Field(ge=0.0, le=1e6)]
NumCores = Annotated[float, Field(ge=0.01, le=4096.0)]
NumGpus = Annotated[float, Field(ge=0.0, le=1024.0)]
ServerUrl = Annotated[
    str,
    Field(
        pattern=r"^(https?|wss?)://[^/?#@\s]+(/[^?#\s]*)?$", examples=["https://a.example/wordle"]
    ),
]
MIN_TEMPERATURE = 0.01  # of sampling


class Block(BaseModel):
    """Base of all blocks: frozen, without unknown keys, without conversions from text.

    Validators are built when the first value is validated: only then are registered types imported.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )


class Document(Block):
    """Base of what is read as a whole from YAML or a run folder."""

    @model_validator(mode="before")
    @classmethod
    def _is_plain_data(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            reject_unusual_values(values)
            remember_config(values)  # before any error message could show a secret of it
        return values


class PythonTarget(Block):
    """Base of the parts that Python code provides: your own, or those of a plugin."""

    type: Literal["python"]
    target: DottedPath = Field(description="module:name of a class or a function")
    options: dict[str, Any] = Field(description="its keyword arguments")
