"""The action and observation types of the protocol."""

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class EchoAction(Action):
    """One message, of any text and length."""

    message: str = Field(description="What to answer to the letter that was shown")


class EchoObservation(Observation):
    """The letter to write next, and what was written last."""

    letter: str = Field(default="", description="The letter to write; empty when the episode ended")
    echoed: str = Field(default="", description="The last message, unchanged")
    message: str = Field(default="", description="What the environment asks or says")
    turn: int = Field(default=0, description="Turns used")
    turns_left: int = Field(default=0, description="Turns left")
