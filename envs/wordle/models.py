"""The action and observation types of the protocol."""

from typing import Literal

from openenv.core.env_server.types import Action, Observation
from pydantic import Field
from typing_extensions import TypedDict


class WordleAction(Action):
    """One guess. Any text is accepted; what is not a word of the list costs a turn."""

    guess: str = Field(description="A five-letter word; case and surrounding spaces are ignored")


class BoardRow(TypedDict):
    """A scored guess: five lowercase letters and five of 'g' green, 'y' yellow, '.' grey."""

    guess: str
    marks: str


class WordleObservation(Observation):
    """The game as a player sees it. `pattern`, `present` and `absent` follow from `board`."""

    board: list[BoardRow] = Field(default_factory=list, description="Scored guesses, oldest first")
    guess: str = Field(default="", description="The last guess, in lowercase")
    marks: str = Field(default="", description="Marks of the last guess; empty if it was invalid")
    pattern: str = Field(default="_____", description="Green letters in place, '_' elsewhere")
    present: str = Field(default="", description="Letters in the word and not yet placed, sorted")
    absent: str = Field(default="", description="Letters known not to be in the word, sorted")
    message: str = Field(default="", description="What the game says about the last turn")
    turn: int = Field(default=0, description="Turns used, 0 to 6")
    turns_left: int = Field(default=0, description="Turns left, 6 to 0")
    status: Literal["playing", "won", "lost"] = Field(default="playing")
    words: str = Field(default="", description="Name of the word list in play")
    answer: str = Field(default="", description="The answer; empty until the game has ended")
