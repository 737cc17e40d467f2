"""Reward terms computed by the trainer from an episode: one number for each turn.

An episode has `first_observation: dict` and `turns`; a turn has `observation: dict`, which is
what the environment answered to it, or {} when the reply never reached the environment. Only
what the player saw is used: never the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .rules import consistent, score


def consistent_guess(episode: Any) -> list[float]:
    """1.0 for each turn that guessed a word of the list which could still be the answer.

    0.0 for an invalid guess, for one that the board before it rules out (which every repetition
    is), and for a reply that never reached the environment.
    """
    return _per_turn(episode, lambda guess, board: float(consistent(guess, board)))


def respected_marks(episode: Any) -> list[float]:
    """The share of the marks on the board that each turn's guess takes into account, 0.0 to 1.0.

    A mark is taken into account if the row would have it again, were the guess the answer; so
    1.0 is a consistent guess. Without a board a listed word earns 1.0; what is no word earns 0.0.
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
    """`value` of each turn's guess and the board before it; 0.0 where no word was guessed."""
    values = []
    board = episode.first_observation.get("board", [])
    for turn in episode.turns:
        # Marks are empty unless the guess was a word of the list.
        is_scored = bool(turn.observation.get("marks"))
        values.append(value(turn.observation["guess"], board) if is_scored else 0.0)
        board = turn.observation.get("board", board)
    return values
