"""Advantages that another package computes from the groups of a step."""

from collections.abc import Sequence
from typing import Any, Protocol

from openenv_pipe.algorithms.advantages import GroupAdvantages
from openenv_pipe.algorithms.credit import trained_turns
from openenv_pipe.config.schema import PythonAdvantageConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.python_targets import load_function
from openenv_pipe.system.user_code import UserCode
from openenv_pipe.system.user_numbers import read_numbers, shown
from openenv_pipe.types import Group

GroupValues = Sequence[Sequence[float]]  # a list for each scored episode, a number for each turn


class CustomAdvantages(Protocol):
    """The function that `trainer.advantage: {type: python}` names."""

    def __call__(self, groups: Sequence[Group], **options: Any) -> Sequence[GroupValues | None]:
        """Return, for each group, a list for each episode of `group.scored`, in that order.

        Such a list has one number per turn of the episode; those of turns that are not trained
        have no effect. None stands for a group that is not trained on.
        """


class UserAdvantages:
    """The advantages of a step's groups as a user's function computes them."""

    def __init__(self, config: PythonAdvantageConfig) -> None:
        """Raises ConfigError if the target cannot be used."""
        self._name = f"trainer.advantage.target={config.target!r}"
        self._options = config.options
        self._function = load_function("trainer.advantage", config, 1)
        self._code = UserCode(self._name)

    def __call__(self, groups: Sequence[Group]) -> list[GroupAdvantages]:
        """Call the function while this thread waits, and check what it returns.

        Raises ConfigError: it has failed, or numbers are missing, too many, or not finite.
        """
        found = self._code.call_blocking(self._function, list(groups), **self._options)
        self._check_length("one entry per group", found, len(groups))
        return [
            GroupAdvantages(
                group=group,
                compared=[episode for episode in group.scored if trained_turns(episode)],
                by_member={} if values is None else self._by_member(group, values),
            )
            for group, values in zip(groups, found, strict=True)
        ]

    def _by_member(self, group: Group, values: Any) -> dict[int, list[float]]:
        where = f"for group {group.id} of task {group.task.id}"
        self._check_length(f"{where} one list per scored episode", values, len(group.scored))
        by_member = {}
        for episode, turns in zip(group.scored, values, strict=True):
            what = f"{where}, member {episode.member}, one number per turn"
            try:
                numbers = read_numbers(turns)
            except ValueError as error:
                raise ConfigError(f"{self._name} returned {error}; expected {what}") from None
            self._check_length(what, numbers, len(episode.turns))
            by_member[episode.member] = numbers
        return by_member

    def _check_length(self, what: str, values: Any, length: int) -> None:
        if not isinstance(values, list | tuple) or len(values) != length:
            raise ConfigError(
                f"{self._name} returned {shown(values)}; expected {what}: a list of length {length}"
            )
