"""The action and observation types of the protocol."""

from typing import Literal

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class TicTacToeAction(Action):
    """One move. Any text is accepted; what names no empty cell loses the game."""

    action: str = Field(description="The number of an empty cell, from 1 to 9, row by row")


class TicTacToeObservation(Observation):
    """The game, all of which both players see."""

    board: str = Field(default="", description="Nine cells, row by row: x, o, or '.' if empty")
    grid: str = Field(
        default="", description="The board in three lines, with the empty cells' numbers"
    )
    turn: str = Field(default="", description="Who is to move: x or o")
    legal_actions: list[str] = Field(default_factory=list, description="Empty at the end")
    message: str = Field(default="", description="What the game says about the last move")
    winner: str = Field(default="", description="x or o; empty if nobody has won")
    status: Literal["playing", "won", "drawn"] = Field(default="playing")
    rewards: dict[str, float] | None = Field(
        default=None, description="What each player has earned, at the end: 1, 0 or -1"
    )
