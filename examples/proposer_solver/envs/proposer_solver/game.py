"""One game: a word is proposed, and four words are written backwards."""

import re

LETTERS = "abcd"
MAX_LENGTH = 8
NUM_WORDS = 4

PROPOSER, SOLVER = "proposer", "solver"


class Game:
    """The proposer writes a word, and the solver gets it in four forms, one after another.

    The forms are the word with its letters moved by 0 to 3 places in the alphabet of four, so that
    they are as long as each other. The solver earns a quarter for each that it writes backwards.
    The proposer earns 1 if that is half of them, and 0 if it is none or all: what is too easy or
    too hard teaches the solver nothing. What is no word ends the game, and nobody earns anything.
    """

    def __init__(self) -> None:
        self.words: list[str] = []
        self.answered = 0
        self.right = 0
        self.is_over = False

    @property
    def turn(self) -> str:
        """Return who is to move."""
        return SOLVER if self.words else PROPOSER

    @property
    def word(self) -> str:
        """Return what the solver is to write backwards; empty while there is nothing to write."""
        return "" if self.is_over or not self.words else self.words[self.answered]

    def play(self, text: str) -> dict[str, float]:
        """Make the move of the player whose turn it is, and return what it has earned each."""
        if self.is_over:
            return {}
        if not self.words:
            self.words = forms(text)
            self.is_over = not self.words
            return {}
        is_right = text == self.word[::-1]
        self.right += is_right
        self.answered += 1
        earned = {SOLVER: is_right / NUM_WORDS}
        if self.answered == NUM_WORDS:
            self.is_over = True
            earned[PROPOSER] = 1 - abs(2 * self.right / NUM_WORDS - 1)
        return earned


def forms(word: str) -> list[str]:
    """Return the word in its four forms, or nothing if it is none of 1 to 8 letters a to d."""
    if not re.fullmatch(f"[{LETTERS}]{{1,{MAX_LENGTH}}}", word):
        return []
    moves = [str.maketrans(LETTERS, LETTERS[by:] + LETTERS[:by]) for by in range(NUM_WORDS)]
    return [word.translate(move) for move in moves]
