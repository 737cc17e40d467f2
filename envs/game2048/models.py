"""The action and observation types of the protocol."""

from typing import Literal

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class Game2048Action(Action):
    """One move. Any text is accepted; what names no legal move costs a turn."""

    action: str = Field(description="up, down, left or right, or the first letter of one")


class Game2048Observation(Observation):
    """The game as a player sees it, which is all of it but the tiles to come."""

    board: list[list[int]] = Field(default_factory=list, description="Rows of tiles; 0 is empty")
    grid: str = Field(default="", description="The board as text; '.' is empty")
    score: int = Field(default=0, description="The sum of all tiles that were made by merging")
    points: int = Field(default=0, description="What the last move added to the score")
    legal_actions: list[str] = Field(default_factory=list, description="Empty at the end")
    message: str = Field(default="", description="What the game says about the last move")
    turn: int = Field(default=0, description="Moves used")
    turns_left: int = Field(default=0, description="Moves left")
    status: Literal["playing", "stuck", "stopped"] = Field(default="playing")
