"""The term `python`: a function of an episode that the user provides."""

import math

from openenv_pipe.config.schema import PythonTerm
from openenv_pipe.errors import ConfigError
from openenv_pipe.rewards.terms import at_the_end
from openenv_pipe.rewards.values import NoValue, TermSources, TermValue, Values, value_each
from openenv_pipe.system.python_targets import call_problem, takes_keyword
from openenv_pipe.system.resources import load_callable
from openenv_pipe.system.user_code import LIMIT_S, UserCode, UserCodeError
from openenv_pipe.system.user_numbers import is_one_number, read_number, read_numbers, shown
from openenv_pipe.types import Episode, Group


class FunctionTerm:
    """A `rewards.values.GroupTerm` whose values a user's function returns.

    For one episode it may take `LIMIT_S`; a verifier has a limit of its own.
    """

    def __init__(self, name: str, term: PythonTerm, sources: TermSources) -> None:
        """Raises ConfigError if the function does not accept an episode and the keywords."""
        self._target = f"reward.terms.{name}.target={term.target!r}"
        self._term = term
        self._function = load_callable(term.target)
        self._code = UserCode(self._target, limit_s=LIMIT_S)
        if takes_keyword(self._function, "completions"):
            raise ConfigError(
                f"{self._target} takes lists of completions, as functions of TRL do; here it is "
                "called with one Episode: def score(episode), see docs/coming_from.md"
            )
        if problem := call_problem(self._function, None, **term.keywords):
            raise ConfigError(
                f"{self._target} cannot be called with an episode and the keywords "
                f"{term.keywords}: {problem}"
            )

    async def values(self, group: Group) -> Values:
        return await value_each(group, self._value)

    async def _value(self, episode: Episode) -> TermValue | NoValue:
        """Return the value of an episode. A single number is the last turn's value."""
        called = (
            f"it was called with an episode of task {episode.task.id} and {self._term.keywords}"
        )
        try:
            returned = await self._code.call(self._function, episode, **self._term.keywords)
        except UserCodeError as error:
            raise ConfigError(f"{error}; {called}") from error
        if returned is None:
            return NoValue(why="its function returned None")
        is_number = is_one_number(returned)
        try:
            by_turn = [read_number(returned)] if is_number else read_numbers(returned)
        except ValueError as error:
            raise ConfigError(
                f"{self._target} returned {error}; return one number for the episode, one number "
                f"per turn, or None; {called}"
            ) from None
        if is_number:
            if self._term.use == "mean":
                raise ConfigError(
                    f"{self._target} returned one number for the episode, and use=mean is for one "
                    "per turn; set use=sum"
                )
            by_turn = at_the_end(episode, by_turn[0])
        elif len(by_turn) != len(episode.turns):
            raise ConfigError(
                f"{self._target} returned {shown(returned)}, {len(by_turn)} values for an episode "
                f"of {len(episode.turns)} turns; return one per turn, or a single number; {called}"
            )
        total = math.fsum(by_turn)
        if self._term.use == "mean":
            total /= max(1, len(by_turn))
        return TermValue(credits=by_turn if self._term.per_turn else [total], total=total)
