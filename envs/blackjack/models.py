"""The action and observation types of the protocol."""

from typing import Literal

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class BlackjackAction(Action):
    """One decision. Any text is accepted; what names no action forfeits the hand."""

    action: str = Field(description="hit or stand, or the first letter of one")


class BlackjackObservation(Observation):
    """The hand as a player sees it. Cards are suit C D H S, then rank 2-9 T J Q K A."""

    cards: list[str] = Field(default_factory=list, description="The player's, in the order dealt")
    total: int = Field(default=0, description="The player's best total")
    soft: bool = Field(default=False, description="Whether an ace counts 11 in it")
    dealer_card: str = Field(default="", description="The dealer's card that lies open")
    dealer_cards: list[str] = Field(
        default_factory=list, description="All of the dealer's; empty until the hand has ended"
    )
    dealer_total: int = Field(default=0, description="0 until the hand has ended")
    legal_actions: list[str] = Field(default_factory=list, description="Empty at the end")
    message: str = Field(default="", description="What the game says about the last action")
    turn: int = Field(default=0, description="Actions taken")
    status: Literal["playing", "won", "drawn", "lost"] = Field(default="playing")
