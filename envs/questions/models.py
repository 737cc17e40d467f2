"""What crosses the wire: the answer of a player and the question that a player sees."""

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class QuestionsAction(Action):
    """One answer, of any text."""

    answer: str = Field(description="The answer, as the question asks for it")


class QuestionsObservation(Observation):
    """The question; never its answer."""

    question: str = Field(default="", description="What is asked, with the choices if there are")
    message: str = Field(default="", description="What the environment says")
