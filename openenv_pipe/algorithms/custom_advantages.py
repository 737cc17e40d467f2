"""Advantages that another package computes from the groups of a step."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from openenv_pipe.algorithms.advantages import GroupAdvantages
from openenv_pipe.algorithms.credit import trained_turns
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Group

GroupValues = Sequence[Sequence[float]]  # a list for each scored episode, a number for each turn


class CustomAdvantages(Protocol):
    """Advantages as `trainer.advantage: {type: python}` names them."""

    def __call__(self, groups: Sequence[Group], **options: Any) -> Sequence[GroupValues | None]:
        """Return, for each group, a list for each episode of `group.scored`, in that order.

        Such a list has one number per turn of the episode; those of turns that are not trained
        have no effect. None stands for a group that is not trained on.
        """


def custom_advantages(function: CustomAdvantages, groups: Sequence[Group]) -> list[GroupAdvantages]:
    """Call the function, whose options are filled in, and check what it returns.

    Raises:
        ConfigError: numbers are missing, too many, or not finite.
    """
    found = function(groups)
    _check_length("one entry per group", found, len(groups))
    return [
        GroupAdvantages(
            group=group,
            compared=[episode for episode in group.scored if trained_turns(episode)],
            by_member={} if values is None else _by_member(group, values),
        )
        for group, values in zip(groups, found, strict=True)
    ]


def _by_member(group: Group, values: GroupValues) -> dict[int, list[float]]:
    _check_length(f"for group {group.id} one list per scored episode", values, len(group.scored))
    by_member = {}
    for episode, turns in zip(group.scored, values, strict=True):
        what = f"for group {group.id}, member {episode.member}, one number per turn"
        _check_length(what, turns, len(episode.turns))
        numbers = [float(value) for value in turns]
        if not all(map(math.isfinite, numbers)):
            raise ConfigError(
                f"trainer.advantage.target returned {numbers}; expected finite {what}"
            )
        by_member[episode.member] = numbers
    return by_member


def _check_length(what: str, values: Any, length: int) -> None:
    if not isinstance(values, Sequence) or len(values) != length:
        raise ConfigError(
            f"trainer.advantage.target returned {str(values)[:100]}; expected {what}: a sequence "
            f"of length {length}"
        )
