"""The action and observation types of the protocol."""

from typing import Literal

from openenv.core.env_server.types import Action, Observation
from pydantic import Field
from typing_extensions import TypedDict


class CodingAction(Action):
    """One attempt: Python source, as it is or in a fenced block of a longer text."""

    code: str = Field(description="The whole program; it has to define the function")


class Example(TypedDict):
    """A call of the function and its result, both as Python writes them."""

    call: str
    result: str


class CodingObservation(Observation):
    """The problem as an agent sees it, and what came of the last attempt."""

    statement: str = Field(default="", description="What the function has to do")
    signature: str = Field(default="", description="Its first line")
    examples: list[Example] = Field(default_factory=list, description="Two tests that are shown")
    feedback: str = Field(default="", description="What came of the last attempt, in words")
    error: str = Field(default="", description="Class of the last attempt's error, or empty")
    message: str = Field(default="", description="Its message; empty for one of a hidden test")
    tests_passed: int = Field(default=0, description="Hidden tests that the last attempt passed")
    tests_total: int = Field(default=0, description="Hidden tests of the problem")
    attempt: int = Field(default=0, description="Attempts used")
    attempts_left: int = Field(default=0, description="Attempts left")
    status: Literal["open", "solved", "failed", "stopped"] = Field(default="open")
