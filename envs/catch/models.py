"""The action and observation types of the protocol."""

from typing import Literal

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class CatchAction(Action):
    """One move. Any text is accepted; what names no move leaves the paddle where it is."""

    action: str = Field(description="left, stay or right, or the first letter of one")


class CatchObservation(Observation):
    """The game as a player sees it, which is all of it. Rows and columns are counted from 0."""

    grid: str = Field(default="", description="A line for each row: 'o' ball, 'x' paddle, '.' free")
    ball_row: int = Field(default=0, description="0 at the top; the paddle's row at the end")
    ball_column: int = Field(default=0, description="0 at the left; the ball falls straight down")
    paddle_column: int = Field(default=0, description="0 at the left")
    legal_actions: list[str] = Field(default_factory=list, description="Empty at the end")
    message: str = Field(default="", description="What the game says about the last move")
    turn: int = Field(default=0, description="Moves made")
    turns_left: int = Field(default=0, description="Moves left")
    status: Literal["playing", "caught", "missed"] = Field(default="playing")
