"""What crosses the wire: the action a player takes and the observation a player sees."""

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class MyEnvAction(Action):
    """One answer, of any text and length."""

    answer: str = Field(description="The letter's place in the alphabet, as a digit")


class MyEnvObservation(Observation):
    """The letter to find next. Nothing here says its place."""

    letter: str = Field(default="", description="The letter; empty when the episode has ended")
    message: str = Field(default="", description="What the environment says")
    turn: int = Field(default=0, description="Turns used")
    turns_left: int = Field(default=0, description="Turns left")
