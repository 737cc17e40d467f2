"""Reward terms that the trainer computes from an episode, with one number for each turn.

An episode has `first_observation: dict` and `turns`. A turn's `observation: dict` is the
environment's answer to it, or {} if the reply never reached the environment. The terms use only
what the player saw, never the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .rules import consistent, score


def consistent_guess(episode: Any) -> list[float]:
    """Return 1.0 for each turn that guessed a word of the list that could still be the answer.

    The value is 0.0 for an invalid guess, for one that the board before it rules out (such as a
    repetition), and for a reply that never reached the environment.
    """
    return _per_turn(episode, lambda guess, board: float(consistent(guess, board)))


def respected_marks(episode: Any) -> list[float]:
    """Return the share of the board's marks that each turn's guess respects, 0.0 to 1.0.

    A guess respects a mark if its row would have the same mark with the guess as the answer, so a
    consistent guess has 1.0. On an empty board a listed word has 1.0. An unlisted word has 0.0.
    """
    return _per_turn(episode, _share_respected)


def _share_respected(guess: str, board: Sequence[Mapping[str, str]]) -> float:
    marks = [
        (seen, again)
        for row in board
        for seen, again in zip(row["marks"], score(row["guess"], guess), strict=True)
    ]
    return sum(seen == again for seen, again in marks) / len(marks) if marks else 1.0


def _per_turn(
    episode: Any, value: Callable[[str, Sequence[Mapping[str, str]]], float]
) -> list[float]:
    """Return `value(guess, board before it)` per turn, or 0.0 if no listed word was guessed."""
    values = []
    board = episode.first_observation.get("board", [])
    for turn in episode.turns:
        # Marks are empty unless the guess was a word of the list.
        is_scored = bool(turn.observation.get("marks"))
        values.append(value(turn.observation["guess"], board) if is_scored else 0.0)
        board = turn.observation.get("board", board)
    return values
