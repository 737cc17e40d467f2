"""Rewards of a group to advantages, one per turn.

Shape letter: G scored episodes of a group.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean

from openenv_pipe.types import Episode, Group

STD_EPSILON = 1e-4  # as in TRL and verl: keeps the quotient bounded where rewards barely differ
ZERO_SPREAD = 1e-8  # differences below this are rounding, not signal


def group_advantages(group: Group, *, scale: str, discount: float) -> dict[int, list[float]] | None:
    """Advantages of each scored episode's turns, by member number; None where there is no signal.

    Without per-turn rewards this is GRPO (Shao et al. 2024, arXiv:2402.03300): an episode's
    reward minus the group's mean, over the group's standard deviation if `scale` is "std"
    (Dr. GRPO, arXiv:2503.20783, argues for "none"), the same for each of its turns.

    With per-turn rewards each turn is judged by itself: its value is the discounted sum of its
    own and later per-turn rewards, plus the episode's part of the reward; its baseline the mean
    over the members that reached the same turn; the divisor the root mean square of the group.

    Failed episodes count nowhere. A group with fewer than two scored episodes, or without any
    spread, is None.
    """
    episodes = group.scored
    if len(episodes) < 2:
        return None
    by_turn = any(episode.turn_rewards for episode in episodes)
    values_G = _turn_values(episodes, discount) if by_turn else _episode_values(episodes)
    advantages_G = _scaled(_centred(values_G), scale, ddof=0 if by_turn else 1)
    if not any(any(values) for values in advantages_G):
        return None
    return {
        episode.member: values if by_turn else values * len(episode.turns)
        for episode, values in zip(episodes, advantages_G, strict=True)
    }


def _episode_values(episodes: Sequence[Episode]) -> list[list[float]]:
    return [[episode.reward] for episode in episodes]


def _turn_values(episodes: Sequence[Episode], discount: float) -> list[list[float]]:
    """One value per turn: what the episode earned as a whole, and what the turn led to."""
    values_G = []
    for episode in episodes:
        following, values = 0.0, []
        for reward in reversed(episode.turn_rewards):
            following = reward + discount * following
            values.append(episode.whole_reward + following)
        values_G.append(values[::-1])
    return values_G


def _centred(values_G: Sequence[Sequence[float]]) -> list[list[float]]:
    """Each value minus the mean over the members that have one at its place."""
    columns = [
        [value for value in column if value is not None] for column in zip_longest(*values_G)
    ]
    means = [fmean(column) for column in columns]
    spreads = [max(column) - min(column) for column in columns]
    return [
        [
            value - mean if spread > ZERO_SPREAD else 0.0
            for value, mean, spread in zip(values, means, spreads, strict=False)
        ]
        for values in values_G
    ]


def _scaled(centred_G: list[list[float]], scale: str, *, ddof: int) -> list[list[float]]:
    """Over the standard deviation of all values, with `ddof` taken from their number."""
    if scale == "none":
        return centred_G
    flat = [value for values in centred_G for value in values]
    deviation = math.sqrt(math.fsum(value * value for value in flat) / max(1, len(flat) - ddof))
    return [[value / (deviation + STD_EPSILON) for value in values] for values in centred_G]
