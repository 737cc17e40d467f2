"""Reward terms computed by the trainer from an episode: one number for each turn.

An episode has `first_observation: dict` and `turns`; a turn has `observation: dict`, which is
what the environment answered to it, or {} when the reply never reached the environment.
"""

from collections.abc import Mapping
from typing import Any


def closer(episode: Any) -> list[float]:
    """By how many columns each turn brought the paddle closer to the ball: 1.0, 0.0 or -1.0.

    The sum over a game depends on its first and last turn alone, so that no play but catching
    earns the most: a potential, in the sense of Ng, Harada and Russell (1999).
    """
    values = []
    distance = _distance(episode.first_observation)
    for turn in episode.turns:
        after = _distance(turn.observation) if turn.observation else distance
        values.append(float(distance - after))
        distance = after
    return values


def _distance(observation: Mapping[str, Any]) -> int:
    return abs(observation["ball_column"] - observation["paddle_column"])
