"""What reward terms return: a value for each episode of a group, or why there is none."""

import math
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.tasks import run_all
from openenv_pipe.system.user_numbers import read_number
from openenv_pipe.types import Episode, Group, Judgement


@dataclass(frozen=True, kw_only=True, slots=True)
class TermValue:
    """The value of a term for one episode, without the term's weight."""

    credits: list[float]  # one for each turn if the term has per_turn, else one for the episode
    total: float  # their sum; it differs only by rounding
    parts: Mapping[str, float] = field(default_factory=dict)  # what it is made of, for the log
    judgement: Judgement | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoValue:
    """Why a term has no value for an episode, which therefore has no reward at all."""

    why: str
    is_failure: bool = True  # of whoever was asked; False: nobody could be


_scored_group: ContextVar[str] = ContextVar("scored_group", default="")
Values = Mapping[int, TermValue | NoValue]  # by member


def scored_group() -> str:
    """Return the id of the group that is being scored, for what asks about it."""
    return _scored_group.get()


@contextmanager
def scoring(group: Group) -> Iterator[None]:
    """Let `scored_group` return this group's id, also in tasks that are started within."""
    token = _scored_group.set(group.id)
    try:
        yield
    finally:
        _scored_group.reset(token)


class GroupTerm(Protocol):
    """A term of the reward, which sees all episodes of a group at once."""

    async def values(self, group: Group) -> Values:
        """Return the values of the episodes that did not fail.

        The reward of a member that is left out is computed without this term.

        Raises JudgeError, ConfigError: the run cannot go on.
        """
        ...


class OpenedTerm(GroupTerm, Protocol):
    """A term that was opened, because it asks others, which may fail."""

    def check(self, num_played: int, reasons: Sequence[str]) -> None:
        """Check the failures of a step or an evaluation.

        reasons: why episodes have no value.

        Raises JudgeError: too many of the episodes that were played have none.
        """

    def settle(self, groups: Collection[str], *, goes_on: bool) -> None:
        """Decide on the failures about these groups, which are given by their ids.

        goes_on: whether the run goes on with them, so that a resumed run has to repeat them;
            otherwise it asks again.
        """


class Judge(Protocol):
    """What the scorer needs of a judge; the terms that it decides use more."""

    @property
    def max_failed_share(self) -> float:
        """The largest share of a rollout batch's episodes that may have no verdict."""

    def settle(self, groups: Collection[str], *, goes_on: bool) -> None:
        """Decide on the failures about these groups, as `OpenedTerm.settle` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TermSources:
    """What terms get their values from.

    The `build` of a term's type is called with the term's name, its configuration and these. It
    returns None if what the term needs is missing, and the term is left out. Where its type has an
    `open`, `open_scorer` calls that first, and enters the context that it returns.
    """

    judge: Judge | None
    opened: Mapping[str, OpenedTerm]  # by name


async def value_each(
    group: Group, value: Callable[[Episode], Coroutine[Any, Any, TermValue | NoValue]]
) -> Values:
    """Return the values of a group's episodes, each by itself and all at once."""
    found = await run_all(value(episode) for episode in group.scored)
    return {episode.member: each for episode, each in zip(group.scored, found, strict=True)}


def check_number(name: str, value: float, episode: Episode) -> float:
    """Return a number of a term. Raises ConfigError if it is not finite or too large."""
    try:
        return read_number(value)
    except ValueError as error:
        raise ConfigError(
            f"reward.terms.{name} gave a value that cannot be used for an episode of task "
            f"{episode.task.id}: {error}"
        ) from None


def weighted(
    numbers: Mapping[str, float], weights: Mapping[str, float], gates: Sequence[str]
) -> float:
    """Return the weighted sum of the numbers with a weight, times the numbers that are gates.

    Without any weights it is the product of the gates alone.
    """
    total = math.fsum(weight * numbers[name] for name, weight in weights.items())
    return math.prod((numbers[name] for name in gates), start=total if weights else 1.0)
