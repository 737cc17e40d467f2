"""Reward terms computed by the trainer from an episode: one number for each turn.

An episode has `first_observation: dict` and `turns`; a turn has `observation: dict`, which is
what the environment answered to it, or {} when the reply never reached the environment. Only
what the player saw is used: never the answer.
"""

from typing import Any

from .rules import consistent


def consistent_guess(episode: Any) -> list[float]:
    """1.0 for each turn that guessed a word of the list which could still be the answer.

    0.0 for an invalid guess, for one that the board before it rules out (which every repetition
    is), and for a reply that never reached the environment.
    """
    values = []
    board = episode.first_observation.get("board", [])
    for turn in episode.turns:
        # Marks are empty unless the guess was a word of the list.
        is_scored = bool(turn.observation.get("marks"))
        values.append(float(is_scored and consistent(turn.observation["guess"], board)))
        board = turn.observation.get("board", board)
    return values
