"""What another reward changes: the means of each term, and how far the two rewards agree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import StatisticsError, correlation, fmean

from openenv_pipe.types import Episode, Group

SAME = 1e-9  # Rewards are sums of floats; smaller differences do not count.
Row = tuple[str, float | None, float | None]


@dataclass(kw_only=True, slots=True)
class Changes:
    """Values of the run and of now, of episodes that are added group by group."""

    before: dict[str, list[float]] = field(default_factory=dict)  # by "reward", "success", term
    now: dict[str, list[float]] = field(default_factory=dict)
    rewards: list[tuple[float, float]] = field(default_factory=list)  # of episodes that have both
    num_groups: int = 0
    num_signals: tuple[int, int] = (0, 0)  # groups in which rewards differ, in the run and now
    num_reordered: int = 0

    def add(self, before: Group, now: Group) -> None:
        """Add a group as the run has it, and as it is scored now; both with the same members."""
        for values, group in ((self.before, before), (self.now, now)):
            for episode in group.scored:
                _add(values, episode)
        pairs = [
            (old.reward, new.reward)
            for old, new in zip(before.episodes, now.episodes, strict=True)
            if old.is_scored and new.is_scored
        ]
        self.rewards += pairs
        self.num_groups += 1
        old, new = (_spreads([each.reward for each in group.scored]) for group in (before, now))
        self.num_signals = (self.num_signals[0] + old, self.num_signals[1] + new)
        self.num_reordered += _is_reordered(pairs)

    @property
    def means(self) -> list[Row]:
        names = dict.fromkeys(["reward", "success", *self.before, *self.now])
        return [(name, _mean(self.before.get(name)), _mean(self.now.get(name))) for name in names]

    @property
    def agreement(self) -> dict[str, float | None]:
        """How far the rewards agree; the correlation is None if one of them is constant."""
        same = [abs(old - new) <= SAME for old, new in self.rewards]
        return {
            "episodes": len(self.now.get("reward", ())),
            "equal_share": _mean(same),
            "correlation": _correlation(self.rewards),
            "groups": self.num_groups,
            "groups_with_signal_before": self.num_signals[0],
            "groups_with_signal_now": self.num_signals[1],
            "groups_reordered": self.num_reordered,
        }


def _add(values: dict[str, list[float]], episode: Episode) -> None:
    numbers = {"reward": episode.reward, "success": float(episode.success)}
    for name, number in {**episode.reward_terms, **numbers}.items():
        values.setdefault(name, []).append(number)


def _mean(values: Sequence[float] | None) -> float | None:
    return fmean(values) if values else None


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 2:
        return None
    try:
        return correlation([old for old, _ in pairs], [new for _, new in pairs])
    except StatisticsError:  # one of them is constant
        return None


def _spreads(rewards: Sequence[float]) -> bool:
    return bool(rewards) and max(rewards) - min(rewards) > SAME


def _is_reordered(pairs: Sequence[tuple[float, float]]) -> bool:
    """Return whether two episodes are ordered otherwise now; to be equal is an order, too."""
    return any(
        _sign(one_old - other_old) != _sign(one_new - other_new)
        for (one_old, one_new), (other_old, other_new) in combinations(pairs, 2)
    )


def _sign(difference: float) -> int:
    return 0 if abs(difference) <= SAME else int(math.copysign(1, difference))
