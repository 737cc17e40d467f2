"""What crosses the wire: the answer of a player and the question that a player sees."""

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class ReasoningAction(Action):
    """One answer, of any text."""

    answer: str = Field(description="The answer alone, as the question asks for it")


class ReasoningObservation(Observation):
    """The question; never its answer."""

    task: str = Field(default="", description="The generator's name in reasoning-gym")
    question: str = Field(default="", description="What is asked, with how to write the answer")
    message: str = Field(default="", description="What the environment says")
