"""One game of Wordle: its answer, its board of guesses and its end."""

from dataclasses import dataclass, field

from .rules import ALL_GREEN, LENGTH, MAX_TURNS, score
from .words import legal_guesses

PLAYING, WON, LOST = "playing", "won", "lost"


@dataclass(kw_only=True, slots=True)
class Game:
    """The state of a game, in progress or ended.

    `guess` and `marks` are those of the last turn; `marks` is empty for an invalid guess,
    which costs a turn but is not added to the board.
    """

    answer: str
    words: str
    board: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0
    status: str = PLAYING
    guess: str = ""
    marks: str = ""

    def play(self, text: str) -> str:
        """Take one turn with what the player wrote, and return the message to show.

        Case and surrounding spaces are ignored. A game that has ended does not change.
        """
        if self.status != PLAYING:
            self.guess = self.marks = ""
            return "The game is over. Reset to play again."
        self.turn += 1
        self.guess, self.marks = text.strip().lower(), ""
        complaint = self._complaint()
        if not complaint:
            self.marks = score(self.guess, self.answer)
            self.board.append({"guess": self.guess, "marks": self.marks})
        if self.marks == ALL_GREEN:
            self.status = WON
            return f"You won on turn {self.turn}."
        if self.turn == MAX_TURNS:
            self.status = LOST
            return f"{complaint} You lost. The word was {self.answer}.".strip()
        return complaint

    def _complaint(self) -> str:
        """Return why the guess is invalid, or '' if it is a word of the list."""
        if self.guess in legal_guesses(self.words):
            return ""
        if len(self.guess) != LENGTH:
            reason = f"it has {len(self.guess)} characters instead of {LENGTH}"
        elif not (self.guess.isascii() and self.guess.isalpha()):
            reason = "it has characters other than the letters a to z"
        else:
            reason = f"{self.guess!r} is not in the word list"
        return f"Invalid guess: {reason}. It cost a turn."
