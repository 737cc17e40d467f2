"""Compute advantages, one per turn, from the rewards of a step's groups.

Shape letter: G scored episodes of a group, or of all groups.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean

from openenv_pipe.algorithms.credit import trained_turn_rewards, trained_turns
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Episode, Group, Status

STD_EPSILON = 1e-4  # as in TRL and verl: keeps the quotient bounded where rewards barely differ
ZERO_SPREAD = 1e-8  # differences below this are rounding, not signal

Values = list[list[float]]  # for each episode: one value per trained turn, or a single one


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdvantages:
    """A group and the advantages of its episodes: one value for each turn."""

    group: Group
    compared: Sequence[Episode]  # those that count in baselines, divisors and means of the loss
    by_member: Mapping[int, list[float]]  # by the episode's number; empty: nothing to learn from
    masked: frozenset[int] = frozenset()  # the numbers of those compared that have no loss

    @property
    def trained(self) -> list[Episode]:
        """The compared episodes that are not masked."""
        return [episode for episode in self.compared if episode.member not in self.masked]

    @property
    def has_signal(self) -> bool:
        """True if a trained turn has an advantage other than 0, which is a learning signal."""
        return any(
            self.by_member[episode.member][index] != 0.0
            for episode in self.trained
            if episode.member in self.by_member
            for index in trained_turns(episode)
        )

    def of(self, episode: Episode) -> list[float] | None:
        """The advantages of an episode's turns; None for an episode that is not trained on."""
        return None if episode.member in self.masked else self.by_member.get(episode.member)

    def without_truncated(self) -> "GroupAdvantages":
        """Mask the episodes that a token limit cut off; baselines, divisors and means keep them.

        As in DAPO (arXiv:2503.14476) and with TRL's mask_truncated_completions.
        """
        cut_off = frozenset(each.member for each in self.compared if _is_cut_off(each))
        return dataclasses.replace(self, masked=cut_off)


def _is_cut_off(episode: Episode) -> bool:
    """Whether a token limit ended the agent's last reply or the episode."""
    last = episode.agent_turns[-1:]
    return episode.status is Status.TOKEN_LIMIT or any(turn.is_cut_off for turn in last)


def step_advantages(
    groups: Sequence[Group], *, baseline: str, scale: str, discount: float
) -> list[GroupAdvantages]:
    """Compute the advantages of each group, in the order of the groups.

    An advantage is (reward - baseline) / scale, the same for each turn of the episode.

    baseline  group: the mean of its group (GRPO, Shao et al. 2024, arXiv:2402.03300)
              leave_one_out: the mean of the group's others (RLOO, arXiv:2402.14740)
              batch: the mean of all episodes of the step (REINFORCE++, arXiv:2501.03262)
    scale     group: the group's standard deviation (GRPO)
              batch: that of all advantages of the step (REINFORCE++)
              mean: the group's mean (MaxRL, Tajwar et al. 2026, arXiv:2602.02710), which needs
              rewards of at least 0: with rewards of 0 and 1, the gradient is that of the log of
              the success rate, to the order of the group's size
              none: 1 (Dr. GRPO, arXiv:2503.20783, and RLOO)

    With per-turn rewards each turn is judged by itself: its value is the discounted sum of its own
    and later per-turn rewards, plus the episode's part of the reward; its baseline is the mean over
    the episodes that reached the same turn, and the divisor is the root mean square. Only trained
    turns count here: a retry or an auxiliary call is not a turn, and has the advantage 0.

    Raises ConfigError for a negative reward with scale `mean`.

    Failed episodes and those without a trained turn count nowhere. Unless the baseline is `batch`,
    a zero-variance group has no learning signal, and neither has a group with fewer than two
    episodes that count.
    """
    alone = 1 if baseline == "batch" else 2
    counted = [[episode for episode in group.scored if trained_turns(episode)] for group in groups]
    compared = [episodes if len(episodes) >= alone else [] for episodes in counted]
    by_turn = any(episode.turn_rewards for episodes in compared for episode in episodes)
    values = [
        [_turn_values(e, discount) if by_turn else [e.reward] for e in episodes]
        for episodes in compared
    ]
    if baseline == "batch":
        centred = _divided(_centred(_joined(values)), values)
    else:
        centred = [
            _centred(each, alone=baseline == "leave_one_out", over_mean=scale == "mean")
            for each in values
        ]
    ddof = 0 if by_turn else 1
    if scale == "batch":
        centred = _divided(_scaled(_joined(centred), ddof=ddof), centred)
    elif scale == "group":
        centred = [_scaled(each, ddof=ddof) for each in centred]
    return [
        GroupAdvantages(group=group, compared=episodes, by_member=_by_member(episodes, each))
        for group, episodes, each in zip(groups, compared, centred, strict=True)
    ]


def gdpo_advantages(
    groups: Sequence[Group], *, weights: Mapping[str, float]
) -> list[GroupAdvantages]:
    """Compute GDPO's advantages (Liu et al. 2026, arXiv:2601.05242), one for all turns.

    Each term of the reward is centred and scaled within its group as GRPO does with their sum, so
    that terms whose values differ little count as much as others. Their weighted sums are centred
    and scaled over the step. Which episodes count is as in `step_advantages`.

    weights: of the terms that count, by name. A term that an episode has no value for adds nothing.
    """
    counted = [[episode for episode in group.scored if trained_turns(episode)] for group in groups]
    compared = [episodes if len(episodes) >= 2 else [] for episodes in counted]
    values = [_sums_of_terms(episodes, weights) for episodes in compared]
    sums = _divided(_scaled(_centred(_joined(values)), ddof=1), values)
    found = []
    for group, episodes, own, scaled in zip(groups, compared, values, sums, strict=True):
        # A group without a spread has no signal, though the mean of the step is not exactly 0.
        by_member = _by_member(episodes, scaled) if _spread(own) > ZERO_SPREAD else {}
        found.append(GroupAdvantages(group=group, compared=episodes, by_member=by_member))
    return found


def _spread(values: Values) -> float:
    flat = [value for each in values for value in each]
    return max(flat) - min(flat) if flat else 0.0


def _sums_of_terms(episodes: Sequence[Episode], weights: Mapping[str, float]) -> Values:
    """Return the weighted sum over the terms, each centred and scaled over the episodes."""
    sums = [0.0] * len(episodes)
    for name, weight in weights.items():
        terms = [each.reward_terms for each in episodes]
        found = [terms_of.get(f"{name}/transformed", terms_of.get(name)) for terms_of in terms]
        known = [index for index, value in enumerate(found) if value is not None]
        values = [[value] for value in found if value is not None]
        for index, (value,) in zip(known, _scaled(_centred(values), ddof=1), strict=True):
            sums[index] += weight * value
    return [[each] for each in sums]


def has_signal(group: Group, *, discount: float, mask_truncated: bool) -> bool:
    """Whether members of the group have different advantages when compared with each other."""
    (found,) = step_advantages([group], baseline="group", scale="none", discount=discount)
    return (found.without_truncated() if mask_truncated else found).has_signal


def _by_member(episodes: Sequence[Episode], advantages_G: Values) -> dict[int, list[float]]:
    if not any(any(values) for values in advantages_G):
        return {}
    return {
        episode.member: _by_turn(episode, values)
        for episode, values in zip(episodes, advantages_G, strict=True)
    }


def _by_turn(episode: Episode, values: Sequence[float]) -> list[float]:
    """Return a value for each turn; a single value holds for all trained turns."""
    found, trained = [0.0] * len(episode.turns), trained_turns(episode)
    of_turns = values if len(values) == len(trained) else list(values) * len(trained)
    for index, value in zip(trained, of_turns, strict=True):
        found[index] = value
    return found


def _joined(values: Sequence[Values]) -> Values:
    return [each for group in values for each in group]


def _divided(joined: Values, like: Sequence[Values]) -> list[Values]:
    """Split joined values into groups again."""
    rest = iter(joined)
    return [[next(rest) for _ in group] for group in like]


def _turn_values(episode: Episode, discount: float) -> list[float]:
    """Return a value per trained turn: the whole episode's reward plus the discounted return."""
    rewards, following, values = trained_turn_rewards(episode), 0.0, []
    for index in reversed(trained_turns(episode)):
        following = (rewards[index] if rewards else 0.0) + discount * following
        values.append(episode.whole_reward + following)
    return values[::-1]


def _centred(values_G: Values, *, alone: bool = False, over_mean: bool = False) -> Values:
    """Subtract from each value the mean over the episodes that have one for the same turn.

    alone: subtract the mean of the others instead, which only multiplies by n / (n - 1).
    over_mean: divide by the mean; raises ConfigError for a negative value.
    """
    columns = [
        [value for value in column if value is not None] for column in zip_longest(*values_G)
    ]
    means = [fmean(column) for column in columns]
    spreads = [max(column) - min(column) for column in columns]
    factors = [len(column) / max(1, len(column) - 1) if alone else 1.0 for column in columns]
    if over_mean:
        if (lowest := min(map(min, columns), default=0.0)) < 0.0:
            raise ConfigError(
                "trainer.advantage.scale=mean divides by the mean of a group's rewards, and an "
                f"episode has the reward {lowest:.3g}, expected at least 0; set "
                "trainer.advantage.scale=group, or change the reward (reward.transforms clips it)"
            )
        factors = [1.0 / mean if mean else 0.0 for mean in means]
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
