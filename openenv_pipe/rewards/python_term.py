"""The term `python`: a function of an episode that the user provides."""

import asyncio
import inspect
import math
import numbers
from typing import Any

from openenv_pipe.config.schema import PythonTerm
from openenv_pipe.errors import ConfigError
from openenv_pipe.rewards.terms import at_the_end
from openenv_pipe.rewards.values import NoValue, TermValue, Values, check_number, value_each
from openenv_pipe.system.python_targets import call_problem
from openenv_pipe.system.resources import load_callable
from openenv_pipe.types import Episode, Group

LIMIT_S = 600.0  # of an asynchronous function for one episode; a verifier has a limit of its own


class FunctionTerm:
    """A `rewards.values.GroupTerm` whose values a function of the user returns."""

    def __init__(self, name: str, term: PythonTerm) -> None:
        """Raises ConfigError if the function does not accept an episode and the keywords."""
        self._name = name
        self._term = term
        self._function = load_callable(term.target)
        if problem := call_problem(self._function, None, **term.keywords):
            raise ConfigError(
                f"reward.terms.{name}.target={term.target!r} cannot be called with an episode and "
                f"the keywords {term.keywords}: {problem}"
            )

    async def values(self, group: Group) -> Values:
        return await value_each(group, self._value)

    async def _value(self, episode: Episode) -> TermValue | NoValue:
        """Return the value of an episode. A single number is the last turn's value."""
        try:
            returned = await self._call(episode)
            if returned is None:
                return NoValue(why="its function returned None")
            is_number = isinstance(returned, numbers.Real)
            by_turn = [float(each) for each in ([returned] if is_number else returned)]
        except Exception as error:  # A user's function may raise anything.
            raise ConfigError(
                f"reward.terms.{self._name}.target={self._term.target!r} raised "
                f"{type(error).__name__}: {error}; it was called with an episode of task "
                f"{episode.task.id} and {self._term.keywords}"
            ) from error
        by_turn = [check_number(self._name, value) for value in by_turn]
        if is_number:
            if self._term.use == "mean":
                raise ConfigError(
                    f"reward.terms.{self._name}.target returned one number for the episode, and "
                    "use=mean is for one per turn; set use=sum"
                )
            by_turn = at_the_end(episode, by_turn[0])
        elif len(by_turn) != len(episode.turns):
            raise ConfigError(
                f"reward.terms.{self._name}.target returned {len(by_turn)} values for an episode "
                f"of {len(episode.turns)} turns; return one per turn, or a single number"
            )
        total = math.fsum(by_turn)
        if self._term.use == "mean":
            total /= max(1, len(by_turn))
        return TermValue(credits=by_turn if self._term.per_turn else [total], total=total)

    async def _call(self, episode: Episode) -> Any:
        returned = self._function(episode, **self._term.keywords)
        if not inspect.isawaitable(returned):
            return returned
        limit = asyncio.timeout(LIMIT_S)
        try:
            async with limit:
                return await returned
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"it returned nothing within {LIMIT_S:g} s; a term of the type verifier has a "
                "limit of its own"
            ) from None
