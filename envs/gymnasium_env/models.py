"""The action and observation types of the protocol."""

from typing import Any

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class GymnasiumAction(Action):
    """One action. The server's own type narrows it to the environment's action space."""

    action: Any = Field(description="A value of the action space")


class GymnasiumObservation(Observation):
    """What Gymnasium returned, as text and as plain values."""

    rules: str = Field(default="", description="The task and the actions; only at the reset")
    text: str = Field(default="", description="The environment's drawing as text, or its value")
    value: Any = Field(default=None, description="The observation; None if it is large")
    legal_actions: list[int] = Field(
        default_factory=list,
        description="Of few discrete actions, those that are legal; none at the end",
    )
    terminated: bool = Field(default=False, description="The task itself has ended")
    truncated: bool = Field(default=False, description="A limit has ended it")
    is_success: bool | None = Field(default=None, description="What info has of that name")
    message: str = Field(default="", description="Why an action was not taken")
