"""The rules of Wordle as pure functions of words and boards.

A board is the sequence of scored guesses, oldest first: mappings with `guess` (five lowercase
letters) and `marks` (five of 'g' green, 'y' yellow, '.' grey). This module expects words of
`LENGTH` letters (words of unequal length raise ValueError); the game checks the text that a player
wrote.
"""

from collections.abc import Mapping, Sequence

LENGTH = 5
MAX_TURNS = 6
GREEN, YELLOW, GREY = "g", "y", "."
ALL_GREEN = GREEN * LENGTH

Row = Mapping[str, str]


def score(guess: str, answer: str) -> str:
    """Return the marks of `guess` for `answer`: five of 'g', 'y', '.'.

    Greens are given first; each letter of the answer then colours at most one letter of the
    guess yellow, from left to right. So 'geese' against 'these' is '..ggg'.
    """
    marks = []
    unmatched = []
    for guessed, true in zip(guess, answer, strict=True):
        if guessed == true:
            marks.append(GREEN)
        else:
            marks.append(GREY)
            unmatched.append(true)
    for position, letter in enumerate(guess):
        if marks[position] == GREY and letter in unmatched:
            marks[position] = YELLOW
            unmatched.remove(letter)
    return "".join(marks)


def consistent(word: str, board: Sequence[Row]) -> bool:
    """Return whether `word` can still be the answer, that is, would give all guesses their marks.

    A word already on the board and not the answer is never consistent.
    """
    return all(score(row["guess"], word) == row["marks"] for row in board)


def pattern(board: Sequence[Row]) -> str:
    """Return the green letters in their places and '_' elsewhere, such as '_r_n_'."""
    placed = ["_"] * LENGTH
    for row in board:
        for position, mark in enumerate(row["marks"]):
            if mark == GREEN:
                placed[position] = row["guess"][position]
    return "".join(placed)


def present(board: Sequence[Row]) -> str:
    """Return the letters known to be in the word but not yet placed, sorted, such as 'aet'.

    A letter that is known to occur twice appears once if it is placed once, twice if never.
    """
    known: dict[str, int] = {}
    for row in board:
        coloured = [
            letter for letter, mark in zip(row["guess"], row["marks"], strict=True) if mark != GREY
        ]
        # Count a letter's known occurrences per row, because two rows may mark the same one.
        for letter in coloured:
            known[letter] = max(known.get(letter, 0), coloured.count(letter))
    placed = pattern(board)
    return "".join(letter * (known[letter] - placed.count(letter)) for letter in sorted(known))


def absent(board: Sequence[Row]) -> str:
    """Return the letters known not to be in the word, sorted.

    A letter that is grey in one place and coloured in another is in the word: not listed.
    """
    grey: set[str] = set()
    coloured: set[str] = set()
    for row in board:
        for letter, mark in zip(row["guess"], row["marks"], strict=True):
            (grey if mark == GREY else coloured).add(letter)
    return "".join(sorted(grey - coloured))
