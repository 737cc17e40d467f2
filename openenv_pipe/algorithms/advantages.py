"""Compute advantages, one per turn, from the rewards of a step's groups.

Shape letter: G scored episodes of a group, or of all groups.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean

from openenv_pipe.types import Episode, Group

STD_EPSILON = 1e-4  # as in TRL and verl: keeps the quotient bounded where rewards barely differ
ZERO_SPREAD = 1e-8  # differences below this are rounding, not signal

Values = list[list[float]]  # for each episode: one value per turn, or a single one


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdvantages:
    """A group and the advantages of its scored episodes: one value for each turn."""

    group: Group
    by_member: Mapping[int, list[float]]  # by the episode's number; empty: nothing to learn from

    @property
    def has_signal(self) -> bool:
        """True if members of the group have different advantages, so that they teach something."""
        return bool(self.by_member)

    def of(self, episode: Episode) -> list[float] | None:
        """The advantages of an episode's turns; None for an episode that is not trained on."""
        return self.by_member.get(episode.member)


def step_advantages(
    groups: Sequence[Group], *, baseline: str, scale: str, discount: float
) -> list[GroupAdvantages]:
    """Compute the advantages of each group, in the order of the groups.

    An advantage is what an episode earned beyond a baseline, over a standard deviation, the same
    for each of its turns.

    baseline  group: the mean of its group (GRPO, Shao et al. 2024, arXiv:2402.03300)
              leave_one_out: of the group's others (RLOO, arXiv:2402.14740)
              batch: of all episodes of the step (REINFORCE++, arXiv:2501.03262)
    scale     group: the group's (GRPO)
              batch: that of all advantages of the step (REINFORCE++)
              none (Dr. GRPO, arXiv:2503.20783, and RLOO)

    With per-turn rewards each turn is judged by itself: its value is the discounted sum of its
    own and later per-turn rewards, plus the episode's part of the reward; its baseline the mean
    over the episodes that reached the same turn; the divisor the root mean square.

    Failed episodes count nowhere. A group without any spread has no signal, and neither has one
    with fewer than two scored episodes, unless it is compared with all others.
    """
    alone = 1 if baseline == "batch" else 2
    counted = [group.scored if len(group.scored) >= alone else [] for group in groups]
    by_turn = any(episode.turn_rewards for episodes in counted for episode in episodes)
    values = [
        _turn_values(episodes, discount) if by_turn else [[e.reward] for e in episodes]
        for episodes in counted
    ]
    if baseline == "batch":
        centred = _divided(_centred(_joined(values)), values)
    else:
        centred = [_centred(each, alone=baseline == "leave_one_out") for each in values]
    ddof = 0 if by_turn else 1
    if scale == "batch":
        centred = _divided(_scaled(_joined(centred), ddof=ddof), centred)
    elif scale == "group":
        centred = [_scaled(each, ddof=ddof) for each in centred]
    return [
        GroupAdvantages(group=group, by_member=_by_member(episodes, each, by_turn=by_turn))
        for group, episodes, each in zip(groups, counted, centred, strict=True)
    ]


def has_signal(group: Group, *, discount: float) -> bool:
    """Whether members of the group have different advantages when compared with each other."""
    (found,) = step_advantages([group], baseline="group", scale="none", discount=discount)
    return found.has_signal


def _by_member(
    episodes: Sequence[Episode], advantages_G: Values, *, by_turn: bool
) -> dict[int, list[float]]:
    if not any(any(values) for values in advantages_G):
        return {}
    return {
        episode.member: values if by_turn else values * len(episode.turns)
        for episode, values in zip(episodes, advantages_G, strict=True)
    }


def _joined(values: Sequence[Values]) -> Values:
    return [each for group in values for each in group]


def _divided(joined: Values, like: Sequence[Values]) -> list[Values]:
    """Split joined values into groups again."""
    rest = iter(joined)
    return [[next(rest) for _ in group] for group in like]


def _turn_values(episodes: Sequence[Episode], discount: float) -> Values:
    """Return one value per turn: the episode's whole reward plus the turn's discounted return."""
    values_G = []
    for episode in episodes:
        following, values = 0.0, []
        for reward in reversed(episode.turn_rewards):
            following = reward + discount * following
            values.append(episode.whole_reward + following)
        values_G.append(values[::-1])
    return values_G


def _centred(values_G: Values, *, alone: bool = False) -> Values:
    """Subtract from each value the mean over the episodes that have one for the same turn.

    alone: subtract the mean of the others instead, which only multiplies by n / (n - 1).
    """
    columns = [
        [value for value in column if value is not None] for column in zip_longest(*values_G)
    ]
    means = [fmean(column) for column in columns]
    spreads = [max(column) - min(column) for column in columns]
    factors = [len(column) / max(1, len(column) - 1) if alone else 1.0 for column in columns]
    return [
        [
            (value - mean) * factor if spread > ZERO_SPREAD else 0.0
            for value, mean, spread, factor in zip(values, means, spreads, factors, strict=False)
        ]
        for values in values_G
    ]


def _scaled(centred_G: Values, *, ddof: int) -> Values:
    """Divide by the standard deviation of all values; `ddof` is subtracted from their number."""
    flat = [value for values in centred_G for value in values]
    deviation = math.sqrt(math.fsum(value * value for value in flat) / max(1, len(flat) - ddof))
    return [[value / (deviation + STD_EPSILON) for value in values] for values in centred_G]
