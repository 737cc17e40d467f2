"""Reward terms that the trainer computes from an episode, with one number for each turn.

An episode has `first_observation: dict` and `turns`. A turn's `observation: dict` is the
environment's answer to it, or {} if the reply never reached the environment.
"""

from collections.abc import Mapping
from typing import Any


def closer(episode: Any) -> list[float]:
    """Return by how many columns each turn moved the paddle closer to the ball: 1.0, 0.0 or -1.0.

    The sum over a game depends only on its first and last position, so only catching has the
    highest sum: potential-based shaping, as in Ng, Harada and Russell (1999).
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
